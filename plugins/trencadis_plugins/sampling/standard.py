"""The standard sampler: a chain of processors, then one draw per row.

    logits ─▶ raw or processed log-probabilities kept, if asked ─▶ float32
           ├─ greedy rows:  processors that can move the maximum ─▶ argmax
           └─ other rows:   the whole chain ─▶ exponential race

Shapes: L logits rows in a call, V vocabulary, P processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from trencadis.errors import InvalidRequestError, RequestError, TrencadisError, did_you_mean
from trencadis.interfaces import Distributions, LogitsProcessor, Sampled, Sampler, SamplingContext, SupportsPreparation
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.arithmetic import likeliest, tensor_on
from trencadis_plugins.sampling.carried import CarriedStates
from trencadis_plugins.sampling.distributions import KeyedDistributions, distributions_of
from trencadis_plugins.sampling.drawing import draw, num_times
from trencadis_plugins.sampling.guard import RowFailures, RowsFailedError, check_one_position
from trencadis_plugins.sampling.host import HostThread
from trencadis_plugins.sampling.logprobs import LogprobReporter
from trencadis_plugins.sampling.philox import Purpose, RowNumbers
from trencadis_plugins.sampling.row_processor import RowProcessor, select
from trencadis_plugins.sampling.static import StaticChain
from trencadis_plugins.sampling.structured import Structured

__all__ = ["StandardSampler"]


class StandardSampler(Sampler, SupportsPreparation):
    """Applies a chain of logits processors, then draws.

    A draw is a function of the row's seed, the position of the token and the processed logits: not of the batch, the
    chunking, a preemption or what other rows ask for.

    Args:
        chain: Processors in order; those that are argmax-invariant are skipped for greedy rows.
        reports_processed: Log-probabilities are those of the processed logits; else the model's own.
    """

    isolates_rows = True

    def __init__(self, chain: Sequence[LogitsProcessor], *, reports_processed: bool = False) -> None:
        self._chain = tuple(chain)
        # Rows that are greedy and log-probabilities need no processor.
        self.honours = frozenset({"greedy", "logprobs"}).union(*(processor.honours for processor in self._chain))
        self._reports_processed = reports_processed
        self._static: StaticChain | None = None
        self._failures = RowFailures()
        self._refused: dict[int, Exception] = {}
        self._moves = np.array([not processor.argmax_invariant for processor in self._chain], np.bool_)

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Use static shapes from now on, if the chain's order allows it; see ``static.py``."""
        static = StaticChain.of(self._chain)
        if static is None:
            return ()
        self._static = static
        return static.paths()

    def check(self, params: SamplingParams) -> None:
        """Refuse unknown processors, invalid arguments, and unsatisfiable constraints."""
        known = {processor.name: processor for processor in self._chain if processor.name}
        for name, arguments in params.logits_processors.items():
            if name not in known:
                raise InvalidRequestError(
                    f"logits_processors names {name!r}, which is not enabled here.{did_you_mean(name, known)} "
                    f"Enabled: {', '.join(known) or 'none'}.",
                    hint="Choose one of those, or ask the operator to list it in [sampling.standard] processors.",
                    field="logits_processors",
                )
            known[name].check(arguments)
        if params.structured is not None:
            self._check_structured(params)

    def _check_structured(self, params: SamplingParams) -> None:
        if not any(isinstance(processor, Structured) for processor in self._chain):
            raise InvalidRequestError(
                "structured output: this engine's chain of logits processors has no structured in it.",
                hint="Leave the field out, or ask the operator to list structured in [sampling.standard] chain.",
                field="structured",
            )
        for processor in self._chain:
            processor.check_params(params)

    def prepare(self, params: SamplingParams, *, tenant: str) -> tuple[Future[Any], ...]:
        """Start the work that processors need before a sequence can run."""
        able = (processor for processor in self._chain if isinstance(processor, SupportsPreparation))
        return tuple(future for processor in able for future in processor.prepare(params, tenant=tenant))

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
        """Set the parameters and the seed of a sequence; replaces those of the row's former one."""
        self._refused.pop(start.row, None)
        self._carried.leave(start.row)
        asks = [self._started(processor, start) for processor in self._chain]
        try:
            self._carried.enter(start)
        except Exception as error:
            self._refused[start.row] = error.with_traceback(None)
        self._reporter.start_row(start)
        self._asks[start.row] = asks
        self._is_greedy[start.row] = start.params.is_greedy
        self._is_plain[start.row] = start.params.is_greedy and not (self._moves & asks).any()
        self._keys[start.row] = start.seed & 0xFFFFFFFF, start.seed >> 32

    def _started(self, processor: LogitsProcessor, start: RowStart) -> bool:
        """Pass a sequence to a processor; returns whether it uses the processor. An exception ends the sequence."""
        try:
            processor.start_row(start)
            return processor.applies_to(start)
        except Exception as error:
            self._refused[start.row] = error.with_traceback(None)
            return False

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Choose one token for each logits row.

        Args:
            logits: ``[L, V]`` in the model's dtype; overwritten if float32.
            context: Whose they are.

        Returns:
            Errors of rows whose logits hold NaN or infinity, or whose masks leave no token, among the rest.
        """
        self._failures = failures = RowFailures()
        rows = np.asarray(context.rows, dtype=np.intp)
        if self._static is not None:
            return self._sample_static(self._static, logits, context, rows)
        is_plain = bool(self._is_plain[rows].all())
        is_last = is_plain and not self._reporter.applies_to(context).any()
        largest = likeliest(logits) if is_plain else None
        logits = failures.check_logits(logits, context, largest=largest, is_last=is_last)
        raw = self._reporter.keep(self._reported(logits, context, rows), context)
        token_ids = self._choose(logits, context, rows) if largest is None else largest
        logprobs = self._reporter.report(raw, token_ids)
        return Sampled(token_ids=token_ids, logprobs=logprobs, **self._errors(context))

    def _errors(self, context: SamplingContext) -> dict[str, Any]:
        if self._refused:
            for index, row in enumerate(context.rows):
                if row in self._refused:
                    _note(self._failures, context, index, self._refused[row])
        return self._failures.fields(context)

    def supports_drafts(self, params: SamplingParams, *, branching: bool) -> bool:
        """Return whether every processor that the sequence uses supports drafts.

        State is kept by position, not by branch, and histories are looked for in their branch by those alone that say so.
        """
        asked = self._asked(_nowhere(params))
        return all(one.speculation_safe and (_supports_branches(one) or not branching) for one in asked)

    def is_portable(self, params: SamplingParams) -> bool:
        """Return whether the state of every processor that the sequence uses can be rebuilt from its tokens."""
        return all(one.rebuilds_state or not one.has_state for one in self._asked(_nowhere(params)))

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether every processor that the sequence uses allows a first token."""
        return all(one.can_start_with(start, token_id) for one in self._asked(start))

    def _asked(self, start: RowStart) -> list[LogitsProcessor]:
        return [processor for processor in self._chain if processor.applies_to(start)]

    @torch.no_grad()
    def verify(
        self, logits: torch.Tensor, context: SamplingContext, choose: Callable[[Distributions], torch.Tensor]
    ) -> Sampled:
        """Apply an acceptance rule to the distributions of the whole chain.

        Args:
            logits: ``[L, V]`` in the model's dtype; overwritten if float32.
            context: Whose they are.
            choose: Returns a token for each logits row.

        Returns:
            Errors see :meth:`sample`; such rows have distributions all the same.
        """
        self._failures = failures = RowFailures()
        logits = failures.check_logits(logits, context)
        rows = np.asarray(context.rows, dtype=np.intp)
        reporter, static = self._reporter, self._static
        raw = (reporter.keep_all if static else reporter.keep)(self._reported(logits, context, rows), context)
        on_host = static is not None and bool((self._asks[rows] & static.on_host).any())
        if on_host:
            distributions = self._host.run(self._distributions, logits, context, rows)
        elif static is not None:
            distributions = self._distribution_rows(
                static.apply(logits.float(), context, draws=~self._is_greedy[rows]), context, rows
            )
        else:
            distributions = self._distributions(logits, context, rows)
        token_ids = choose(KeyedDistributions(distributions, keys=self._keys[rows], positions=context.positions))
        stateful = [one for one in self._active(context) if one.has_state]
        if stateful and on_host:
            held = token_ids.cpu()
            self._host.run(lambda _, told, __: self._committed(held, stateful, told), logits[:, :1], context, rows)
        else:
            self._committed(token_ids, stateful, context)
        logprobs = (reporter.report_all if static else reporter.report)(raw, token_ids)
        return Sampled(token_ids=token_ids, logprobs=logprobs, **self._errors(context))

    def _distributions(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        return self._distribution_rows(self._applied(self._active(context), logits.float(), context), context, rows)

    def _distribution_rows(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        self._check_choices(logits, logits.amax(-1), context)
        return distributions_of(logits, is_greedy=tensor_on(self._is_greedy[rows], logits.device))

    def _sample_static(
        self, static: StaticChain, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray
    ) -> Sampled:
        draws = ~self._is_greedy[rows]
        on_host = bool((self._asks[rows] & static.on_host).any())
        # Before the device is waited for: while it computes the logits, the host may have these to make.
        times = self._times(logits, context) if draws.any() and not on_host else None
        logits = self._failures.check_logits(logits, context)
        raw = self._reporter.keep_all(self._reported(logits, context, rows), context)
        if self._is_plain[rows].all():
            token_ids = logits.argmax(-1)
        elif on_host:
            token_ids = self._host.run(self._choose, logits, context, rows)
        else:
            logits = static.apply(logits.float(), context, draws=draws)
            peaks = logits.amax(-1)
            self._check_choices(logits, peaks, context)
            token_ids = logits.argmax(-1)
            if times is not None:
                drawn = draw(logits, peaks, times)
                token_ids = torch.where(tensor_on(draws, logits.device), drawn, token_ids)
        logprobs = self._reporter.report_all(raw, token_ids)
        return Sampled(token_ids=token_ids, logprobs=logprobs, **self._errors(context))

    def _reported(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        """Return the logits whose log-probabilities are reported; ``logits`` are not changed."""
        asks = self._reporter.applies_to(context) & ~self._is_plain[rows]
        if not (self._reports_processed and asks.any()):
            return logits
        if self._static is not None:
            return self._host.run(self._processed, logits, context, rows)
        return self._processed(logits.to(torch.float32, copy=True), context, rows)

    def _processed(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        """Return processed logits of rows that request log-probabilities, the others unchanged; works in place."""
        asks, is_greedy = self._reporter.applies_to(context), self._is_greedy[rows]
        for index, among in (
            (np.flatnonzero(asks & is_greedy), self._moves),
            (np.flatnonzero(asks & ~is_greedy), True),
        ):
            if len(index):
                part, part_context = select(logits, context, index)
                part = self._applied(self._active(part_context, among), part, part_context)
                logits[tensor_on(index, logits.device)] = part
        return logits

    def _choose(self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        is_greedy = self._is_greedy[rows]
        for index, choose in ((np.flatnonzero(is_greedy), self._maximize), (np.flatnonzero(~is_greedy), self._draw)):
            if len(index):
                part, part_context = select(logits, context, index)
                token_ids[tensor_on(index, logits.device)] = choose(part.float(), part_context)
        return token_ids

    def _maximize(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        active = self._active(context, self._moves)
        logits = self._applied(active, logits, context)
        token_ids = likeliest(logits)
        self._check_choices(logits, logits.gather(1, token_ids[:, None])[:, 0], context)
        return self._committed(token_ids, active, context)

    def _draw(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        active = self._active(context)
        logits = self._applied(active, logits, context)
        peaks = logits.amax(-1)
        self._check_choices(logits, peaks, context)
        return self._committed(draw(logits, peaks, self._times(logits, context)), active, context)

    def _check_choices(self, logits: torch.Tensor, peaks: torch.Tensor, context: SamplingContext) -> None:
        self._failures.check_choices(logits, peaks, context, self._ruling, self._failure)

    def _failure(self, row: int, position: int) -> str:
        """Return why a processor has masked every token at a place, if the request is not to blame; empty otherwise."""
        found = (one.failures.get((row, position), "") for one in self._chain if isinstance(one, RowProcessor))
        return next(filter(None, found), "")

    def _ruling(self, row: int) -> str:
        """Return the names of a row's parameters that can mask tokens."""
        asking = [one for one, asks in zip(self._chain, self._asks[row], strict=True) if asks]
        named = [getattr(one, "label", "") for one in asking]
        return " and ".join([name for name in named if name]) or "the parameters"

    def _applied(
        self, processors: Sequence[LogitsProcessor], logits: torch.Tensor, context: SamplingContext
    ) -> torch.Tensor:
        """Return logits after the given processors; a failure for one sequence is recorded, and affects no other."""
        for processor in processors:
            try:
                logits = processor.apply(logits, self._handed(processor, context))
            except RowsFailedError as failed:
                logits = failed.logits
                for index, message in failed.messages.items():
                    self._failures.add(context, index, message)
            except Exception as error:
                logits = self._applied_apart(processor, logits, context, error)
        return logits

    def _applied_apart(
        self, processor: LogitsProcessor, logits: torch.Tensor, context: SamplingContext, error: Exception
    ) -> torch.Tensor:
        """Apply a processor that raised to the sequences one by one."""
        indices_of: dict[int, list[int]] = {}
        for index, row in enumerate(context.rows):
            indices_of.setdefault(row, []).append(index)
        if len(indices_of) == 1:
            for index in range(len(context.rows)):
                _note(self._failures, context, index, error)
            return logits
        for indices in indices_of.values():
            part, part_context = select(logits, context, np.array(indices))
            logits[tensor_on(indices, logits.device)] = self._applied([processor], part, part_context)
        return logits

    def _committed(
        self, token_ids: torch.Tensor, active: Sequence[LogitsProcessor], context: SamplingContext
    ) -> torch.Tensor:
        """Pass the chosen tokens to processors with state. If one raises, its sequences end: its state is lost."""
        for processor in active:
            if not processor.has_state:
                continue
            try:
                processor.commit(token_ids, self._handed(processor, context))
            except Exception as error:
                asks = self._asks[:, self._chain.index(processor)]
                self._refused |= {row: error.with_traceback(None) for row in context.rows if asks[row]}
        return token_ids

    def _handed(self, processor: LogitsProcessor, context: SamplingContext) -> SamplingContext:
        """Return the context for a processor: without branches, if it does not support them."""
        if processor.supports_branches or not processor.needs_history:
            return context
        return context.by_row(len(self._asks))

    def _active(self, context: SamplingContext, among: np.ndarray | bool = True) -> list[LogitsProcessor]:
        """Return the processors that at least one row uses."""
        is_active = self._asks[np.asarray(context.rows, dtype=np.intp)].any(0) & among
        active = [self._chain[i] for i in np.flatnonzero(is_active)]
        for processor in active:
            if not processor.speculation_safe:
                check_one_position(context, processor)
        return active

    def _times(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Return the waiting times of a draw from each logits row, ``[L, num_times(V)]``."""
        keys, positions = self._keys[list(context.rows)], np.add(context.positions, 1)
        numbers = RowNumbers(keys=keys, positions=positions, device=logits.device)
        return numbers.times(Purpose.SAMPLE, num_times(logits.shape[1]))


def _nowhere(params: SamplingParams) -> RowStart:
    return RowStart(row=0, token_ids=np.empty(0, np.int32), num_prompt_tokens=0, params=params, seed=0)


def _supports_branches(processor: LogitsProcessor) -> bool:
    return not processor.has_state and (processor.supports_branches or not processor.needs_history)


def _note(failures: RowFailures, context: SamplingContext, index: int, error: Exception) -> None:
    """Record an exception as message for the client whose row it ends."""
    named = isinstance(error, ValueError | TrencadisError)
    message = str(error) if named else f"{type(error).__name__}: {error}"
    failures.add(context, index, message, is_invalid=isinstance(error, RequestError))
