"""A scheduling policy that is asked what it would do, beside the one that decides: compared and counted, never obeyed."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.errors import ContractError
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array, Request, read_only

__all__ = ["NO_SHADOW", "Shadow", "ShadowStep"]

logger = logging.getLogger("trencadis.engine")

T = TypeVar("T")


@attrs.frozen
class ShadowStep:
    """What came of the comparison in one step.

    Attributes:
        was_asked: There was something to compare.
        differs: The shadow would have chosen otherwise.
        displacement: Places by which it would order the waiting sequences otherwise, their mean; 0 if no order was asked for.
        spent_s: What it took, seconds.
    """

    was_asked: bool = False
    differs: bool = False
    displacement: float = 0.0
    spent_s: float = 0.0


NO_SHADOW = ShadowStep()
"""Of a step without a shadow."""


class Shadow:
    """Asks a policy what the live one was asked, with the same arguments; whatever it raises ends it and nothing else.

    It is asked only what the live policy is asked: ``give_way`` only if that one preempts. It sees what the live policy's choices led
    to, not what its own would have.

    Args:
        label: Names the component and its distribution in messages.
        policy: The one to ask.
        clock: For its cost.
        meter: Measures its calls; one that is too slow is asked no more.

    Attributes:
        label: As given.
        fault: Why it is asked no more; empty while it is.
        num_steps: Steps in which it was asked something.
        num_differing: Steps in which it would have chosen otherwise.
        num_orders: Orders that it was asked for.
        differing: Answers that differed, by method.
        spent_s: What it took in all, seconds.
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

    @property
    def mean_displacement(self) -> float:
        """Places by which it orders the waiting sequences otherwise, mean over sequences and orders."""
        return self._displacements / self.num_orders if self.num_orders else 0.0

    # ------------------------------------------------------------------------------------------------ it is told

    def introduce(self, live: Iterable[tuple[int, Request]]) -> None:
        """Tell it of the requests that are there, in the order of arrival."""
        for slot, request in live:
            self.on_added(slot=slot, request=request)

    def on_added(self, *, slot: int, request: Request) -> None:
        """Tell it of a new request."""
        self._ask("on_added", lambda: self._policy.on_added(slot=slot, request=request))

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Tell it that a sequence left."""
        self._ask(
            "on_finished",
            lambda: self._policy.on_finished(slot=slot, tenant=tenant, num_output_tokens=num_output_tokens),
        )

    # ------------------------------------------------------------------------------------------------ it is asked

    def admit(self, live: str, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> None:
        """Ask whether it would refuse a request."""
        answer = self._ask(
            "admit", lambda: self._policy.admit(request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens)
        )
        if answer is not None and bool(answer) is not bool(live):
            self.differing["admit"] += 1

    def order(self, live: Int32Array, view: SchedulerView) -> None:
        """Ask for an order."""
        order = self._ask("order", lambda: self._order(view))
        if order is None:
            return
        # Sorted by slot, both name the places of the same sequences.
        places, own = np.argsort(live, kind="stable"), np.argsort(order, kind="stable")
        displacement = float(np.abs(places - own).mean()) if len(places) else 0.0
        self.num_orders += 1
        self._displacements += displacement
        self._step.displacement += displacement
        self._compare("order", displacement == 0, live, order)

    def split(self, live: TokenSplit, view: SchedulerView, *, token_budget: int) -> None:
        """Ask for budgets; those beyond the step's are the same as the step's."""
        split = self._ask("split", lambda: self._policy.split(copy.copy(view), token_budget=token_budget))
        if split is not None:
            same = [min(one, token_budget) == min(own, token_budget) for one, own in zip(live, split, strict=True)]
            self._compare("split", all(same), live, split)

    def chunk(self, live: int, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> None:
        """Ask for the size of a chunk."""
        chunk = self._ask(
            "chunk",
            lambda: self._policy.chunk(
                copy.copy(view), slot=slot, num_remaining=num_remaining, token_budget=token_budget
            ),
        )
        if chunk is not None:
            self._compare("chunk", chunk == live, live, chunk)

    def victim(self, live: int, view: SchedulerView, *, candidates: Int32Array) -> None:
        """Ask who should lose its blocks."""
        victim = self._ask("victim", lambda: self._policy.victim(copy.copy(view), candidates=read_only(candidates)))
        if victim is not None:
            self._compare("victim", victim == live, live, victim)

    def give_way(self, live: int, view: SchedulerView, *, slot: int, candidates: Int32Array) -> None:
        """Ask who should give way."""
        victim = self._ask(
            "give_way", lambda: self._policy.give_way(copy.copy(view), slot=slot, candidates=read_only(candidates))
        )
        if victim is not None:
            self._compare("give_way", victim == live, live, victim)

    # ------------------------------------------------------------------------------------------------ what came of it

    def take_step(self) -> ShadowStep:
        """Return what came of the step that was planned, and begin the next."""
        done, self._step = self._step, _Open()
        self.num_steps += done.was_asked
        self.num_differing += done.differs
        return ShadowStep(done.was_asked, done.differs, done.displacement, done.spent_s)

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

    def _order(self, view: SchedulerView) -> Int32Array:
        order = np.asarray(self._policy.order(copy.copy(view)))
        if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.sort(view.waiting)):
            raise ContractError(f"order() returned {shown(order)}, no permutation of {shown(view.waiting)}")
        return order

    def _ask(self, method: str, call: Callable[[], T]) -> T | None:
        """Return its answer; None if it gives none any more."""
        if self.fault:
            return None
        start_s = self._clock.now_s()
        began = self._meter.begin()
        try:
            return call()
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
    was_asked: bool = False
    differs: bool = False
    displacement: float = 0.0
    spent_s: float = 0.0
