"""The standard sampler: a chain of processors, then one draw per row.

    logits ─▶ raw log-probabilities kept, if asked ─▶ float32
           ├─ greedy rows:  processors that can move the maximum ─▶ argmax
           └─ other rows:   the whole chain ─▶ exponential race

Shapes: L logits rows in a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.interfaces import LogitsProcessor, Sampled, Sampler, SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.drawing import draw
from trencadis_plugins.sampling.guard import check_choices, check_logits
from trencadis_plugins.sampling.logprobs import LogprobReporter
from trencadis_plugins.sampling.philox import Purpose
from trencadis_plugins.sampling.row_processor import RowProcessor, select
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
        self._movers = tuple(processor for processor in self._chain if not processor.argmax_invariant)

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Work with static shapes from now on, if every processor of the chain can; see ``static.py``."""
        static = StaticChain.of(self._chain)
        if static is None:
            return ()
        self._static = static
        return static.paths()

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._is_greedy = np.ones(num_rows, dtype=np.bool_)
        self._is_plain = np.ones(num_rows, dtype=np.bool_)
        self._keys = np.zeros((num_rows, 2), dtype=np.int64)
        self._reporter = LogprobReporter(num_rows)
        for processor in self._chain:
            processor.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)

    def start_row(self, start: RowStart) -> None:
        """Take the parameters and the seed of a sequence; forgets what the row held."""
        for processor in self._chain:
            processor.start_row(start)
        self._reporter.start_row(start)
        self._is_greedy[start.row] = start.params.is_greedy
        self._is_plain[start.row] = start.params.is_greedy and not any(_asks(mover, start) for mover in self._movers)
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
            return self._sample_static(logits, context, rows)
        raw = self._reporter.keep(logits, context)
        token_ids = logits.argmax(-1) if self._is_plain[rows].all() else self._choose(logits, context, rows)
        return Sampled(token_ids=token_ids, logprobs=self._reporter.report(raw, token_ids))

    def _sample_static(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> Sampled:
        static = self._static
        assert static is not None, "called with a static chain"
        raw = self._reporter.keep_all(logits, context)
        if self._is_plain[rows].all():
            token_ids = logits.argmax(-1)
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
        for processor in self._movers:
            logits = processor.apply(logits, context)
        check_choices(logits.amax(-1), context)
        return logits.argmax(-1)  # the lowest id among equals

    def _draw(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for processor in self._chain:
            logits = processor.apply(logits, context)
        peaks = logits.amax(-1)
        check_choices(peaks, context)
        return self._race(logits, peaks, context)

    def _race(self, logits: torch.Tensor, peaks: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        keys = torch.as_tensor(self._keys[list(context.rows)], device=logits.device)
        positions = torch.as_tensor(context.positions, device=logits.device) + 1
        return draw(logits, peaks, keys=keys, positions=positions, purpose=Purpose.SAMPLE)


def _asks(processor: LogitsProcessor, start: RowStart) -> bool:
    # A processor from elsewhere does not say which rows it changes: take it that it changes all.
    return processor.asks(start) if isinstance(processor, RowProcessor) else True
