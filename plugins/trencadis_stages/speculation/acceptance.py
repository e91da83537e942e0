"""The acceptance rule, guarded: what it returns is checked, and what it raises ends no more than it must.

It lives with the backend, on its thread; no tensor library is imported here.

Shapes: V vocabulary, B sequences, N most drafts of one of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.activity import ACTIVITY
from trencadis.engine.guard import Guarded
from trencadis.engine.stage import Made
from trencadis.errors import StepFailedError
from trencadis.faults import CallMeter
from trencadis.interfaces import AcceptanceRule, Verification, model_distribution, possible_drafts
from trencadis.interfaces.laws import Rule

if TYPE_CHECKING:
    import torch

__all__ = ["GuardedAcceptance", "guarded_acceptance"]


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
        meter = CallMeter(label, thread=ACTIVITY.device)
        super().__init__(AcceptanceRule, label, strategy, make_fallback, meter=meter)
        self.fault = ""
        self._remake = remake
        self._adopt()

    def __reduce__(self) -> tuple[Callable[[], AcceptanceRule], tuple[()]]:
        if self._remake is None:
            raise TypeError(f"{self.label} cannot travel to another process")
        return self._remake, ()

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return how likely each draft stands, ``[B, N]``; 0 for all if the rule erred."""
        if not self._can_judge(verification):
            return _none(verification)
        accept = self.ask.accept(verification)
        is_shown = verification.target is not None and not self.lossless
        return accept * possible_drafts(verification) if is_shown else accept

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the last token, ``[B, V]``; the model's own if the rule erred."""
        if self.fault or not self.needs_distributions:
            return model_distribution(verification, stops)
        weights = self.ask.last(verification, stops)
        return weights if self.lossless else weights * (model_distribution(verification, stops) > 0)

    def _can_judge(self, verification: Verification) -> bool:
        """Return whether drafts may stand, and the rule in place is shown what it needs."""
        return not self.fault and (verification.target is None) != self.needs_distributions

    def _made(self, rule: Rule, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return super()._made(
            rule, lambda verification, *stops: call(_copied(verification), *[one.clone() for one in stops])
        )

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Put the fallback in place, or let no draft stand from now on; the last token of the step is the model's own."""
        try:
            self.quarantine(error)
        except StepFailedError as failed:
            self.fault = str(failed)
            self._faults.say(self.label, f"{failed} No draft stands from now on.", error=error, level=logging.ERROR)
        else:
            self._adopt()
        if rule.method == "last":
            return model_distribution(*args)
        return self._plain["accept"](*args) if self._can_judge(*args) else _none(*args)

    def _adopt(self) -> None:
        rule = self.strategy
        self.lossless, self.needs_distributions, self.supports_trees = (
            rule.lossless,
            rule.needs_distributions,
            rule.supports_trees,
        )


def guarded_acceptance(made: Made) -> GuardedAcceptance:
    """Return a rule, guarded; in the process of a rank it is made again."""
    remake = None if made.remake is None else functools.partial(_made_again, made.remake)
    return GuardedAcceptance(made.label, made.component, made.make_fallback, remake=remake)


def _made_again(remake: Callable[[], tuple[Made, object]]) -> AcceptanceRule:
    made, _ = remake()
    return GuardedAcceptance(made.label, made.component, made.make_fallback)


def _none(verification: Verification) -> torch.Tensor:
    """Return that no draft stands. Pure."""
    nothing: torch.Tensor = verification.tokens.float() * 0.0
    return nothing


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
