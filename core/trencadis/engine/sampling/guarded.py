"""Guard of the sampler: its answers are checked, and an exception ends only the requests whose rows cause it.

It lives with the backend, on its thread. Core imports no tensor library: what is used here are methods of the tensors it is handed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trencadis.engine.guard import Guarded
from trencadis.engine.request_check import check_honoured
from trencadis.engine.sampling.logprobs import wrong_logprobs
from trencadis.errors import ContractError, StepFailedError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces import (
    Distributions,
    Sampled,
    SampledLogprobs,
    Sampler,
    SamplingContext,
)
from trencadis.interfaces.laws import legal
from trencadis.records import RowError, RowStart, SamplingParams, parameters_in

if TYPE_CHECKING:
    import torch

__all__ = ["GuardedSampler"]


class GuardedSampler(Guarded[Sampler], Sampler):
    """A sampler whose tokens are tokens.

    One that promises ``isolates_rows`` is called as it is; what it raises fails the step. Any other is handed copies of logits and
    histories. If it errs its fallback chooses the same tokens' places; without a fallback each sequence is sampled alone, and those
    that it errs for get an error.

    A fallback is shown each row with the tokens that it has by then.

    Args:
        label: See :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`Guarded`.
    """

    def __init__(self, label: str, strategy: Sampler, make_fallback: Callable[[], Sampler] | None = None) -> None:
        super().__init__(Sampler, label, strategy, make_fallback)
        self._sizes: dict[str, Any] = {}
        self._is_static = False
        self._starts: dict[int, RowStart] = {}
        self._unknown: dict[int, RowStart] = {}
        self._refused: dict[int, str] = {}
        self._histories: torch.Tensor | None = None

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Use static shapes, in the sampler and in its fallback."""
        self._is_static = True
        return self.strategy.use_static_shapes()

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room; what the sampler raises ends the start."""
        self._sizes = {"num_rows": num_rows, "vocab_size": vocab_size, "device": device}
        self.strategy.allocate(**self._sizes)

    # -------------------------------------------------------------------------------------------------- guarded

    def start_row(self, start: RowStart) -> None:
        """Show the sampler a sequence; if it raises, its fallback takes over, or that sequence ends with the error."""
        row = start.row
        self._starts[row] = start
        self._unknown.pop(row, None)
        self._refused.pop(row, None)
        try:
            if self.num_quarantined:
                self._check_again(start.params)
            self.strategy.start_row(self._own(start))
        except BaseException as error:
            reraise_interrupt(error)
            if self._replace(error):
                return
            self._refused[row] = self._told(error)

    def _check_again(self, params: SamplingParams) -> None:
        """Refuse what a fallback does not say that it honours: the request was accepted for the sampler before it."""
        check_honoured(params, parameters_in(self.strategy.honours), self.label)
        self.strategy.check(params)

    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Return a token for each logits row, or an error of the row."""
        if self.strategy.isolates_rows and not self._unknown:
            try:
                return self._checked(self.strategy.sample(logits, context), logits, context)
            except BaseException as error:
                reraise_interrupt(error)
                raise self._step_failed(error) from error
        return self._sample(logits, context)

    def verify(
        self, logits: torch.Tensor, context: SamplingContext, choose: Callable[[Distributions], torch.Tensor]
    ) -> Sampled:
        """Sample as :meth:`sample` does, with the tokens that ``choose`` draws from the sampler's distributions. An exception of the sampler fails the step."""
        self._tell_rows(context)
        try:
            return self._checked(self.strategy.verify(logits, self._lent(context), choose), logits, context)
        except StepFailedError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            raise self._step_failed(error) from error

    def _sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Sample copies, so that there is something left to go on with."""
        while True:
            self._tell_rows(context)
            try:
                return self._checked(self.strategy.sample(logits.clone(), self._lent(context)), logits, context)
            except BaseException as error:
                reraise_interrupt(error)
                if not self._replace(error):
                    return self._sample_apart(logits, context, error)

    def _sample_apart(self, logits: torch.Tensor, context: SamplingContext, error: BaseException) -> Sampled:
        """Sample one sequence after the other: an error of one is none of the others'."""
        indices_of: dict[int, list[int]] = {}
        for index, row in enumerate(context.rows):
            indices_of.setdefault(row, []).append(index)
        token_ids = logits.argmax(-1) * 0
        found: list[Sampled] = []
        if len(indices_of) == 1:
            message = self._told(error)
            found.append(_failed_rows(token_ids, range(len(context.rows)), message))
        for indices in indices_of.values() if len(indices_of) > 1 else ():
            part = _part(context, indices)
            try:
                sampled = self._checked(self.strategy.sample(logits[indices], self._lent(part)), logits[indices], part)
            except BaseException as own:
                reraise_interrupt(own)
                sampled = _failed_rows(token_ids, range(len(indices)), self._told(own))
            for index, token in zip(indices, sampled.token_ids.tolist(), strict=False):
                token_ids[index] = token
            found.append(_moved(sampled, indices))
        return Sampled(
            token_ids=token_ids,
            logprobs=tuple(entry for one in found for entry in one.logprobs),
            row_errors=tuple(entry for one in found for entry in one.row_errors),
        )

    def _checked(self, sampled: Sampled, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Return what was sampled, with the errors of rows that were refused.

        Raises:
            ContractError: It is no answer to the call.
        """
        late = None if self.strategy.isolates_rows else getattr(sampled, "late_errors", None)
        if late is not None:
            # Now its fallback, or each sequence alone, can still be sampled.
            sampled = attrs.evolve(sampled, row_errors=(*sampled.row_errors, *late()), late_errors=None)
        legal(Sampler.sample, sampled, logits, context)
        if not self.strategy.isolates_rows:
            for entry in sampled.logprobs:
                fault = "that is no SampledLogprobs"
                if isinstance(entry, SampledLogprobs):
                    fault = wrong_logprobs(entry, end=len(context.rows), vocab_size=logits.shape[1])
                if fault:
                    raise ContractError(f"it has log-probabilities {fault}")
        if not self._refused:
            return sampled
        refused = [
            RowError(index=index, message=self._refused[row])
            for index, row in enumerate(context.rows)
            if row in self._refused
        ]
        return attrs.evolve(sampled, row_errors=(*refused, *sampled.row_errors)) if refused else sampled

    # ------------------------------------------------------------------------------------------------ fallback

    def _replace(self, error: BaseException) -> bool:
        """Put the fallback in place; False if there is none. It is shown each row when that is next sampled."""
        if self._make_fallback is None:
            return False
        self.quarantine(error)
        if self._is_static:
            self.strategy.use_static_shapes()
        if self._sizes:
            self.strategy.allocate(**self._sizes)
        self._unknown = dict(self._starts)
        self._refused.clear()
        return True

    def _step_failed(self, error: BaseException) -> StepFailedError:
        """Return the error of a step that failed with the call; the step that takes its place has the fallback, if there is one."""
        if self._replace(error):
            return StepFailedError(f"{self.label} takes over; the step is computed again.")
        return StepFailedError(
            self._told(error), hint="Mend or replace the component, or name a fallback in [sampling]."
        )

    def _tell_rows(self, context: SamplingContext) -> None:
        """Show a fallback the rows of a call that it does not know."""
        if not self._unknown:
            return
        for row, history, position in zip(context.rows, context.histories, context.positions, strict=True):
            start = self._unknown.pop(row, None)
            if start is not None:
                tokens = np.array(context.tokens[history, : position + 1].tolist(), np.int32)
                self.start_row(attrs.evolve(start, token_ids=tokens))

    def _lent(self, context: SamplingContext) -> SamplingContext:
        """Return the context with copies of the histories of its rows, unless the sampler leaves them as they are."""
        if self.strategy.isolates_rows:
            return context
        if self._histories is None or self._histories.shape != context.tokens.shape:
            self._histories = context.tokens.clone()
        rows, width = list(context.histories), max(context.positions) + 1
        self._histories[rows, :width] = context.tokens[rows, :width]
        return attrs.evolve(context, tokens=self._histories)

    def _own(self, start: RowStart) -> RowStart:
        return start if self.strategy.isolates_rows else attrs.evolve(start, token_ids=start.token_ids.copy())

    def _told(self, error: BaseException) -> str:
        """Return an error as words that name the sampler; logs it, once and then a count."""
        text = f"{self.label} raised {as_words(error)}"
        self._faults.say(self.label, text, error=error, level=logging.ERROR)
        return text


def _part(context: SamplingContext, indices: Sequence[int]) -> SamplingContext:
    return attrs.evolve(
        context,
        rows=tuple(context.rows[i] for i in indices),
        positions=tuple(context.positions[i] for i in indices),
        branches=None if context.branches is None else tuple(context.branches[i] for i in indices),
    )


def _failed_rows(token_ids: torch.Tensor, indices: Sequence[int], message: str) -> Sampled:
    return Sampled(
        token_ids=token_ids[: len(indices)],
        row_errors=tuple(RowError(index=index, message=message) for index in indices),
    )


def _moved(sampled: Sampled, indices: Sequence[int]) -> Sampled:
    return attrs.evolve(
        sampled,
        logprobs=tuple(attrs.evolve(entry, index=indices[entry.index]) for entry in sampled.logprobs),
        row_errors=tuple(attrs.evolve(entry, index=indices[entry.index]) for entry in sampled.row_errors),
    )
