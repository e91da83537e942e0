"""The standard sampler: a chain of processors, then one draw per row.

    logits ─▶ raw log-probabilities kept, if asked ─▶ float32
           ├─ greedy rows:  processors that can move the maximum ─▶ argmax
           └─ other rows:   the whole chain ─▶ exponential race

Shapes: L logits rows in a call, V vocabulary, P processors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.errors import InvalidRequestError, did_you_mean
from trencadis.interfaces import LogitsProcessor, Sampled, Sampler, SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.carried import CarriedStates
from trencadis_plugins.sampling.drawing import draw
from trencadis_plugins.sampling.guard import check_choices, check_logits, check_one_position
from trencadis_plugins.sampling.host import HostThread
from trencadis_plugins.sampling.logprobs import LogprobReporter
from trencadis_plugins.sampling.philox import Purpose
from trencadis_plugins.sampling.row_processor import select
from trencadis_plugins.sampling.static import StaticChain

__all__ = ["StandardSampler"]


class StandardSampler(Sampler):
    """Applies a chain of logits processors and draws.

    A draw is a function of the row's seed, the position of the token and the processed logits: not of the batch, the
    chunking, a preemption or what other rows ask for.

    Args:
        chain: Processors in order; those that are argmax-invariant are skipped for greedy rows.
    """

    def __init__(self, chain: Sequence[LogitsProcessor]) -> None:
        self._chain = tuple(chain)
        self._static: StaticChain | None = None
        self._moves = np.array([not processor.argmax_invariant for processor in self._chain], np.bool_)

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Work with static shapes from now on, if the chain's order allows it; see ``static.py``."""
        static = StaticChain.of(self._chain)
        if static is None:
            return ()
        self._static = static
        return static.paths()

    def check(self, params: SamplingParams) -> None:
        """Refuse processors that the chain does not have, and arguments that they do not take."""
        known = {processor.name: processor for processor in self._chain if processor.name}
        for name, arguments in params.logits_processors.items():
            if name not in known:
                raise InvalidRequestError(
                    f"logits_processors names {name!r}, which is not enabled here; enabled: "
                    f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}",
                    hint="Choose one of those, or ask the operator to list it in [sampling.standard] processors.",
                )
            known[name].check(arguments)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._is_greedy = np.ones(num_rows, dtype=np.bool_)
        self._is_plain = np.ones(num_rows, dtype=np.bool_)
        self._asks = np.zeros((num_rows, len(self._chain)), dtype=np.bool_)
        self._keys = np.zeros((num_rows, 2), dtype=np.int64)
        self._reporter = LogprobReporter(num_rows)
        self._carried = CarriedStates([processor for processor in self._chain if processor.has_state])
        self._host = HostThread()
        on_host = self._static.on_host if self._static is not None else np.zeros(len(self._chain), np.bool_)
        for processor, is_on_host in zip(self._chain, on_host, strict=True):
            where = torch.device("cpu") if is_on_host else device
            processor.allocate(num_rows=num_rows, vocab_size=vocab_size, device=where)

    def start_row(self, start: RowStart) -> None:
        """Take the parameters and the seed of a sequence; forgets what the row held."""
        self._carried.leave(start.row)
        for processor in self._chain:
            processor.start_row(start)
        self._carried.enter(start)
        self._reporter.start_row(start)
        self._asks[start.row] = asks = [processor.asks(start) for processor in self._chain]
        self._is_greedy[start.row] = start.params.is_greedy
        self._is_plain[start.row] = start.params.is_greedy and not (self._moves & asks).any()
        self._keys[start.row] = start.seed & 0xFFFFFFFF, start.seed >> 32

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Choose one token for each logits row.

        Args:
            logits: ``[L, V]`` in the model's dtype; overwritten if float32.
            context: Whose they are.

        Raises:
            ValueError: A row's logits hold NaN or infinity, or its masks leave no token; names the row.
        """
        check_logits(logits, context)
        rows = np.asarray(context.rows, dtype=np.intp)
        if self._static is not None:
            return self._sample_static(self._static, logits, context, rows)
        raw = self._reporter.keep(logits, context)
        token_ids = logits.argmax(-1) if self._is_plain[rows].all() else self._choose(logits, context, rows)
        return Sampled(token_ids=token_ids, logprobs=self._reporter.report(raw, token_ids))

    def _sample_static(
        self, static: StaticChain, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray
    ) -> Sampled:
        raw = self._reporter.keep_all(logits, context)
        if self._is_plain[rows].all():
            token_ids = logits.argmax(-1)
        elif (self._asks[rows] & static.on_host).any():
            token_ids = self._host.run(self._choose, logits, context, rows)
        else:
            draws = ~self._is_greedy[rows]
            logits = static.apply(logits.float(), context, draws=draws)
            peaks = logits.amax(-1)
            check_choices(peaks, context)
            token_ids = logits.argmax(-1)
            if draws.any():
                drawn = self._race(logits, peaks, context)
                token_ids = torch.where(torch.as_tensor(draws, device=logits.device), drawn, token_ids)
        return Sampled(token_ids=token_ids, logprobs=self._reporter.report_all(raw, token_ids))

    def _choose(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        is_greedy = self._is_greedy[rows]
        for index, choose in ((np.flatnonzero(is_greedy), self._maximize), (np.flatnonzero(~is_greedy), self._draw)):
            if len(index):
                part, part_context = select(logits, context, index)
                token_ids[torch.as_tensor(index, device=logits.device)] = choose(part.float(), part_context)
        return token_ids

    def _maximize(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        active = self._active(context, self._moves)
        for processor in active:
            logits = processor.apply(logits, context)
        check_choices(logits.amax(-1), context)
        return _committed(logits.argmax(-1), active, context)  # the lowest id among equals

    def _draw(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        active = self._active(context)
        for processor in active:
            logits = processor.apply(logits, context)
        peaks = logits.amax(-1)
        check_choices(peaks, context)
        return _committed(self._race(logits, peaks, context), active, context)

    def _active(self, context: SamplingContext, among: np.ndarray | bool = True) -> list[LogitsProcessor]:
        """Return the processors that some row asks for: the others cost nothing."""
        is_active = self._asks[np.asarray(context.rows, dtype=np.intp)].any(0) & among
        active = [self._chain[i] for i in np.flatnonzero(is_active)]
        for processor in active:
            if not processor.speculation_safe:
                check_one_position(context, processor)
        return active

    def _race(self, logits: torch.Tensor, peaks: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        keys = torch.as_tensor(self._keys[list(context.rows)], device=logits.device)
        positions = torch.as_tensor(context.positions, device=logits.device) + 1
        return draw(logits, peaks, keys=keys, positions=positions, purpose=Purpose.SAMPLE)


def _committed(token_ids: torch.Tensor, active: Sequence[LogitsProcessor], context: SamplingContext) -> torch.Tensor:
    for processor in active:
        if processor.has_state:
            processor.commit(token_ids, context)
    return token_ids
