"""Sampler and acceptance rule, guarded: what they return is checked, and what they raise ends no more than it must.

Both live with the backend, on its thread. Core imports no tensor library: what is used here are methods of the tensors it is handed.

Shapes: L logits rows in a call, V vocabulary, B sequences, N most drafts of one of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trencadis.engine.commit.output_check import wrong_logprobs
from trencadis.engine.guard import Guarded
from trencadis.engine.request_check import check_honoured
from trencadis.errors import ContractError, StepFailedError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces import (
    AcceptanceRule,
    Distributions,
    Sampled,
    SampledLogprobs,
    Sampler,
    SamplingContext,
    Verification,
)
from trencadis.records import RowError, RowStart, SamplingParams, parameters_in

if TYPE_CHECKING:
    import torch

__all__ = ["GuardedAcceptance", "GuardedSampler"]

_MOST = 1 + 1e-6
"""Largest share of a draft: what rounding leaves of 1."""


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
        self._untold: dict[int, RowStart] = {}
        self._refused: dict[int, str] = {}
        self._histories: torch.Tensor | None = None

    # ----------------------------------------------------------------------------------------------- passed on

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """As the sampler; its fallback does so, too."""
        self._is_static = True
        return self.strategy.use_static_shapes()

    def check(self, params: SamplingParams) -> None:
        """As the sampler."""
        self.strategy.check(params)

    def supports_drafts(self, params: SamplingParams, *, branching: bool) -> bool:
        """As the sampler."""
        return self.strategy.supports_drafts(params, branching=branching)

    def is_portable(self, params: SamplingParams) -> bool:
        """As the sampler."""
        return self.strategy.is_portable(params)

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """As the sampler."""
        return self.strategy.can_start_with(start, token_id)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room; what the sampler raises ends the start."""
        self._sizes = {"num_rows": num_rows, "vocab_size": vocab_size, "device": device}
        self.strategy.allocate(**self._sizes)

    # -------------------------------------------------------------------------------------------------- guarded

    def start_row(self, start: RowStart) -> None:
        """Show the sampler a sequence; if it raises, its fallback takes over, or that sequence ends with the error."""
        row = start.row
        self._starts[row] = start
        self._untold.pop(row, None)
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
        if self.strategy.isolates_rows and not self._untold:
            try:
                return self._checked(self.strategy.sample(logits, context), logits, context)
            except BaseException as error:
                reraise_interrupt(error)
                raise self._step_failed(error) from error
        return self._sample(logits, context)

    def verify(
        self, logits: torch.Tensor, context: SamplingContext, choose: Callable[[Distributions], torch.Tensor]
    ) -> Sampled:
        """As :meth:`sample`, with the tokens that ``choose`` draws from the sampler's distributions. An exception of the sampler fails the step."""
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
        if not isinstance(sampled, Sampled):
            raise ContractError(f"it returned {type(sampled).__name__}, not Sampled")
        if sampled.late_errors is not None and not self.strategy.isolates_rows:
            # Now its fallback, or each sequence alone, can still be sampled.
            sampled = attrs.evolve(sampled, row_errors=(*sampled.row_errors, *sampled.late_errors()), late_errors=None)
        fault = _wrong_ids(sampled.token_ids, logits)
        if not fault and sampled.logprobs and not self.strategy.isolates_rows:
            fault = _wrong_entries(sampled.logprobs, len(context.rows), self._sizes.get("vocab_size", 1 << 31))
        if not fault and sampled.row_errors:
            fault = _wrong_errors(sampled.row_errors, len(context.rows))
        if fault:
            raise ContractError(fault)
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
        self._untold = dict(self._starts)
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
        if not self._untold:
            return
        for row, history, position in zip(context.rows, context.histories, context.positions, strict=True):
            start = self._untold.pop(row, None)
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


class GuardedAcceptance(Guarded[AcceptanceRule], AcceptanceRule):
    """An acceptance rule that lets no draft stand against its contract.

    It is shown copies. A rule that is lossless lets no draft stand, and no token follow, that the model gives no chance: of greedy
    requests that leaves exactly the text without drafts. If it errs its fallback takes over; without one no draft stands any more, which
    is always right. Of a rule that is lossy and is shown distributions no such draft stands, and no such token follows, whatever it returns:
    the request may have ruled them out, by structured output or a list of tokens.

    Args:
        label: See :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`Guarded`.
        remake: Makes the same rule again in the process of a rank, to which it travels.

    Attributes:
        fault: Why no draft stands any more, in words; empty: drafts may stand.
    """

    def __init__(
        self,
        label: str,
        strategy: AcceptanceRule,
        make_fallback: Callable[[], AcceptanceRule] | None = None,
        *,
        remake: Callable[[], AcceptanceRule] | None = None,
    ) -> None:
        super().__init__(AcceptanceRule, label, strategy, make_fallback)
        self.fault = ""
        self._remake = remake
        self._adopt()

    def __reduce__(self) -> tuple[Callable[[], AcceptanceRule], tuple[()]]:
        if self._remake is None:
            raise TypeError(f"{self.label} cannot travel to another process")
        return self._remake, ()

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return how likely each draft stands, ``[B, N]``; 0 for all if the rule erred."""
        while not self.fault and (verification.target is None) != self.needs_distributions:
            try:
                accept = self.strategy.accept(_copied(verification))
                fault = self._wrong_shares(accept, verification)
                if fault:
                    raise ContractError(fault)
            except BaseException as error:
                reraise_interrupt(error)
                self._replace(error)
            else:
                is_shown = verification.target is not None and not self.lossless
                return accept * self._are_possible(verification) if is_shown else accept
        nothing: torch.Tensor = verification.tokens.float() * 0.0
        return nothing

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the last token, ``[B, V]``; the model's own if the rule erred."""
        target = verification.target
        assert target is not None, "only asked of rules that are shown distributions"
        own: torch.Tensor = target.gather(1, stops[:, None, None].expand(-1, 1, target.shape[2]))[:, 0]
        if self.fault or not self.needs_distributions:
            return own
        try:
            weights = self.strategy.last(_copied(verification), stops.clone())
            fault = self._wrong_weights(weights, own)
            if fault:
                raise ContractError(fault)
        except BaseException as error:
            reraise_interrupt(error)
            self._replace(error)
            return own
        return weights if self.lossless else weights * (own > 0)

    def _replace(self, error: BaseException) -> None:
        """Put the fallback in place, or let no draft stand from now on."""
        try:
            self.quarantine(error)
        except StepFailedError as failed:
            self.fault = str(failed)
            self._faults.say(self.label, f"{failed} No draft stands from now on.", error=error, level=logging.ERROR)
        else:
            self._adopt()

    def _adopt(self) -> None:
        rule = self.strategy
        self.lossless, self.needs_distributions, self.supports_trees = (
            rule.lossless,
            rule.needs_distributions,
            rule.supports_trees,
        )

    def _wrong_shares(self, accept: torch.Tensor, verification: Verification) -> str:
        """Return what is wrong with an answer; waits for the device once."""
        tokens = verification.tokens
        fault = _wrong_tensor("accept()", accept, tokens.shape, tokens.device)
        if fault:
            return fault
        sound = (accept >= 0) & (accept <= _MOST)
        if self.lossless:
            sound = sound & ((accept <= 0) | self._are_possible(verification))
        if bool(sound.all()):
            return ""
        return (
            "accept() returned shares outside 0 to 1, or, of a rule that says that it is lossless, lets drafts stand that the model does "
            "not choose"
        )

    def _are_possible(self, verification: Verification) -> torch.Tensor:
        """Return which drafts the model could have chosen, bool ``[B, N]``: of a greedy request the one that it chooses."""
        tokens, target = verification.tokens, verification.target
        if target is None:
            assert verification.sampled is not None, "it is shown distributions or tokens"
            chosen: torch.Tensor = verification.sampled.gather(1, verification.parents) == tokens
            return chosen
        places = verification.parents * target.shape[2] + tokens.clamp(min=0)
        possible: torch.Tensor = target.flatten(1).gather(1, places) > 0
        return possible

    def _wrong_weights(self, weights: torch.Tensor, own: torch.Tensor) -> str:
        fault = _wrong_tensor("last()", weights, own.shape, own.device)
        if fault:
            return fault
        best = weights.argmax(-1, keepdim=True)
        top = weights.gather(1, best)
        sound = (top > 0) & (top < math.inf)
        # Of a lossy rule some possible token must be left, with or without the largest weight.
        left = own.gather(1, best) if self.lossless else (weights * (own > 0)).amax(-1, keepdim=True)
        sound = sound & (left > 0)
        if bool((sound[:, 0] & (weights.amin(-1) >= 0)).all()):
            return ""
        return (
            "last() gave weights that are not a distribution: negative, not finite, all 0 where the model gives a token a chance, or, of a rule "
            "that says that it is lossless, most for a token that the model gives none"
        )


def _copied(verification: Verification) -> Verification:
    """Return the drafts with copies of the tensors that the text is written from. Distributions are copies already."""
    sampled = verification.sampled
    return attrs.evolve(
        verification,
        tokens=verification.tokens.clone(),
        parents=verification.parents.clone(),
        num_drafts=verification.num_drafts.clone(),
        sampled=None if sampled is None else sampled.clone(),
    )


def _wrong_tensor(what: str, tensor: Any, shape: Sequence[int], device: torch.device) -> str:
    """Return what is wrong with what should be numbers on the device. Pure."""
    if not hasattr(tensor, "is_floating_point"):
        return f"{what} returned {type(tensor).__name__}, not a tensor"
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_floating_point() or tensor.device != device:
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        return f"{what} returned {got}, not floating-point numbers {tuple(shape)} on {device}"
    return ""


def _wrong_ids(token_ids: Any, logits: torch.Tensor) -> str:
    """Return what is wrong with tokens; their range only where they are on the host: elsewhere the backend looks once they are."""
    if str(getattr(token_ids, "dtype", "")) != "torch.int64":
        return f"its token_ids are {getattr(token_ids, 'dtype', type(token_ids).__name__)}, not a tensor of torch.int64"
    num_rows, vocab_size = logits.shape
    if tuple(token_ids.shape) != (num_rows,) or token_ids.device != logits.device:
        return f"its token_ids are {tuple(token_ids.shape)} on {token_ids.device}, not ({num_rows},) on {logits.device}"
    if token_ids.device.type != "cpu" or not num_rows:
        return ""
    ids: np.ndarray = token_ids.numpy()
    # As unsigned numbers negative ones are the largest: one comparison instead of two.
    if np.maximum.reduce(ids.view(np.uint64)) < vocab_size:
        return ""
    wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
    return f"it chose token {wrong}; the model knows 0 to {vocab_size - 1}"


def _wrong_entries(entries: tuple[SampledLogprobs, ...], num_rows: int, vocab_size: int) -> str:
    for entry in entries:
        fault = "that is no SampledLogprobs"
        if isinstance(entry, SampledLogprobs):
            fault = wrong_logprobs(entry, end=num_rows, vocab_size=vocab_size)
        if fault:
            return f"it has log-probabilities {fault}"
    return ""


def _wrong_errors(errors: tuple[RowError, ...], num_rows: int) -> str:
    for error in errors:
        if not isinstance(error, RowError) or type(error.index) is not int or not 0 <= error.index < num_rows:
            return f"it has an error of a row that is none of 0 to {num_rows - 1}"
    return ""


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
