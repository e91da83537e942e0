"""A scheduling policy that is asked what it would do, beside the one that decides: compared and counted, never obeyed."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
from trencadis.interfaces import SchedulerView, SchedulingPolicy, legal, rules_of
from trencadis.records import Request

__all__ = ["Shadow", "make_shadow"]

logger = logging.getLogger("trencadis.engine")


_UNASKED = frozenset({"admit_tenant"})


class Shadow:
    """Asks a policy what the live one was asked, with the same arguments; whatever it raises ends it and nothing else.

    It is asked only what the live policy is asked: ``preempt_for`` only if that one preempts. It sees what the live policy's choices led
    to, not what its own would have.

    Args:
        label: Names the component and its distribution in messages.
        policy: The one to ask.
        clock: For its cost.
        meter: Measures its calls; one that is too slow is asked no more.

    Attributes:
        label: The argument.
        fault: Why it is asked no more; empty while it is.
        num_steps: Steps in which it was asked something.
        num_differing: Steps in which it would have chosen otherwise.
        num_orders: Orders that it was asked for.
        differing: Answers that differed, by method.
        spent_s: Time that it took in all, seconds.
    """

    def __init__(self, label: str, policy: SchedulingPolicy, *, clock: Clock, meter: CallMeter | None = None) -> None:
        self.label = label
        self.fault = ""
        self.num_steps = self.num_differing = self.num_orders = 0
        self.differing: Counter[str] = Counter()
        self.spent_s = 0.0
        self._policy = policy
        self._clock = clock
        self._meter = meter or CallMeter(label)
        self._displacements = 0.0
        self._step = _Open()
        for method, rule in rules_of(SchedulingPolicy).items():
            if method not in _UNASKED:
                setattr(self, method, partial(self._ask if rule.is_told else self._ask_too, method))

    @property
    def mean_displacement(self) -> float:
        """Places by which it orders the waiting sequences otherwise, mean over sequences and orders."""
        return self._displacements / self.num_orders if self.num_orders else 0.0

    def introduce(self, live: Iterable[tuple[int, Request]]) -> None:
        """Tell it of the requests that are there, in the order of arrival."""
        for slot, request in live:
            self._ask("on_added", slot=slot, request=request)

    # ------------------------------------------------------------------------------------------------ what came of it

    def take_step(self) -> dict[str, float]:
        """Return the numbers of the step that was planned, by field of ``StepStats``, and begin the next."""
        done, self._step = self._step, _Open()
        self.num_steps += done.was_asked
        self.num_differing += done.differs
        return {
            "num_shadow_steps": int(done.was_asked),
            "num_shadow_differing": int(done.differs),
            "shadow_displacement": done.displacement,
            "shadow_s": done.spent_s,
        }

    def report(self) -> Mapping[str, Any]:
        """Return all of it as a table."""
        return {
            "component": self.label,
            "fault": self.fault,
            "num_steps": self.num_steps,
            "num_differing_steps": self.num_differing,
            "mean_rank_displacement": round(self.mean_displacement, 3),
            "differing": dict(self.differing),
            "seconds": round(self.spent_s, 6),
        }

    def _ask_too(self, method: str, live: object, *args: Any, **named: Any) -> None:
        """Ask what the live policy answered, and compare."""
        own = self._ask(method, *args, **named)
        if own is None:
            return
        if method == "admit":  # between two steps
            if bool(own) is not bool(live):
                self.differing["admit"] += 1
        elif method == "order":
            self._compare(method, self._displacement(live, own) == 0, live, own)
        elif method == "split":  # budgets beyond the step's are the same as the step's
            most = named["token_budget"]
            self._compare(method, [min(one, most) for one in own] == [min(one, most) for one in live], live, own)  # type: ignore[attr-defined] # a TokenSplit
        else:
            self._compare(method, own == live, live, own)

    def _displacement(self, live: Any, own: Any) -> float:
        """Return by how many places it orders the waiting sequences otherwise, their mean."""
        # Sorted by slot, both name the places of the same sequences.
        places, others = np.argsort(live, kind="stable"), np.argsort(own, kind="stable")
        displacement = float(np.abs(places - others).mean()) if len(places) else 0.0
        self.num_orders += 1
        self._displacements += displacement
        self._step.displacement += displacement
        return displacement

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Return its answer; None if it gives none any more."""
        if self.fault:
            return None
        start_s = self._clock.now_s()
        began = self._meter.begin()
        try:
            shown_to_it = [copy.copy(one) if isinstance(one, SchedulerView) else one for one in args]
            answer = getattr(self._policy, method)(*shown_to_it, **named)
            return legal(SchedulingPolicy.order, answer, *args) if method == "order" else answer
        except BaseException as error:
            reraise_interrupt(error)
            self._ask_no_more(f"it raised {as_words(error)}.", error)
            return None
        finally:
            took_s = self._meter.end(began)
            if took_s > self._meter.budget_s and (slow := self._meter.overran(method, took_s)):
                self._ask_no_more(f"it {slow}.")
            spent_s = self._clock.now_s() - start_s
            self.spent_s += spent_s
            self._step.spent_s += spent_s

    def _ask_no_more(self, fault: str, error: BaseException | None = None) -> None:
        self.fault = fault
        FaultLog(logger).say(
            self.label, f"Shadow {self.label}: {fault} It is asked no more.", error=error, level=logging.ERROR
        )

    def _compare(self, what: str, is_same: bool, live: object, own: object) -> None:
        self._step.was_asked = True
        if is_same:
            return
        self._step.differs = True
        self.differing[what] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Shadow %s: %s would be %s; in force is %s.", self.label, what, shown(own), shown(live))


@attrs.define
class _Open:
    """A step that is being planned.

    Attributes:
        was_asked: There was something to compare.
        differs: The shadow would have chosen otherwise.
        displacement: Places by which it would order the waiting sequences otherwise, their mean; 0 if no order was asked for.
        spent_s: Time that it took, seconds.
    """

    was_asked: bool = False
    differs: bool = False
    displacement: float = 0.0
    spent_s: float = 0.0


class Shadowing(Stage):
    """Has the configured shadow asked beside the policy that decides, until another takes its place."""

    def __init__(self, label: str, policy: SchedulingPolicy, meter: CallMeter) -> None:
        self._label, self._policy, self._meter = label, policy, meter

    def bind(self, engine: EngineParts) -> None:
        """Put it beside the policy."""
        engine.policy.put_beside(Shadow(self._label, self._policy, clock=engine.state.clock.source, meter=self._meter))


def make_shadow(makings: Makings) -> Stage | None:
    """Return the stage; None: no shadow is configured."""
    shadow = None if makings.builder is None else makings.builder.plan.shadow
    if makings.builder is None or shadow is None:
        return None
    label = str(shadow.component)
    return Shadowing(label, makings.builder.make(shadow), makings.meter("scheduling", f"{label} (shadow)"))
