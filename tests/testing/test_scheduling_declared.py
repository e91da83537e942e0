"""A policy that does not keep what it declares fails, and so does one that minds what must not matter."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis.records import Request
from trencadis_plugins.scheduling.config import PriorityConfig
from trencadis_plugins.scheduling.fair_share import FairShare
from trencadis_plugins.scheduling.priority import Priority
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.scheduling_declared import DeclaredBehaviour

IN_ORDER = "test_declared_order_of_arrival_is_kept"
PRIORITIES = "test_declared_priorities_are_kept"
RUNNING = "test_declared_priorities_are_kept_of_those_that_run"
FAIRNESS = "test_declared_fairness_is_bounded"
SPLIT = "test_arrivals_split_over_two_steps_that_admit_nobody_are_served_the_same"
UNIT = "test_lengths_and_blocks_of_another_unit_are_served_the_same"
IDLE = "test_a_tenant_that_is_idle_changes_nothing_for_the_others"


class InOrder(DeclaredBehaviour):
    declares = frozenset({"arrival_order"})


class ByPriority(DeclaredBehaviour):
    declares = frozenset({"priority_order"})


class Fair(DeclaredBehaviour):
    declares = frozenset({"fairness"})


class LastComeFirst(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[::-1]


class SparesTheYoungest(SchedulingPolicy):
    def victim(self, view: SchedulerView, *, candidates) -> int:
        return int(candidates[0])


class PreemptsTheUrgent(Priority):
    def victim(self, view: SchedulerView, *, candidates) -> int:
        return int(candidates[np.argmin(view.priority[candidates])])


class NeverGivesWay(Priority):
    """Says that it preempts, and does not."""

    preempts = True

    def __init__(self) -> None:
        super().__init__(PriorityConfig(preempt=True))

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates) -> int:
        return -1


class ChargesAgain(FairShare):
    """Charges a sequence for its whole prompt whenever it comes back."""

    def order(self, view: SchedulerView):
        again = view.waiting[view.num_preemptions[view.waiting] > 0]
        self._paid.set_all(again, 0.0)
        return super().order(view)


class CountsSteps(SchedulingPolicy):
    """Who came in the latest step goes first."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.places: dict[int, int] = {}

    def on_added(self, *, slot: int, request: Request) -> None:
        self.places[slot] = -self.num_calls

    def split(self, view: SchedulerView, *, token_budget: int):
        self.num_calls += 1
        return super().split(view, token_budget=token_budget)

    def order(self, view: SchedulerView):
        return np.array(sorted(view.waiting.tolist(), key=lambda slot: self.places.get(slot, 0)), np.int32)


class LikesRoundNumbers(SchedulingPolicy):
    """Prompts of up to eight tokens first."""

    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.num_tokens[view.waiting] > 8, kind="stable")]


class GrudgesByTenantNumber(SchedulingPolicy):
    """Who is tenant number 1 waits: which that is depends on who was here before."""

    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.tenant[view.waiting] == 1, kind="stable")]


@pytest.mark.parametrize(
    ("suite", "make", "only"),
    [
        (InOrder, LastComeFirst, IN_ORDER),
        (InOrder, SparesTheYoungest, IN_ORDER),
        (ByPriority, ServeInOrder, PRIORITIES),
        (ByPriority, PreemptsTheUrgent, PRIORITIES),
        (ByPriority, NeverGivesWay, RUNNING),
        (Fair, ChargesAgain, FAIRNESS),
        (DeclaredBehaviour, CountsSteps, SPLIT),
        (DeclaredBehaviour, LikesRoundNumbers, UNIT),
        (DeclaredBehaviour, GrudgesByTenantNumber, IDLE),
    ],
)
def test_a_promise_that_is_not_kept_is_found(failures_of, suite, make, only) -> None:
    assert failures_of(suite, make, only=only) == {only}


@pytest.mark.parametrize(
    ("suite", "make", "only"),
    [
        (InOrder, ServeInOrder, IN_ORDER),
        (ByPriority, Priority, PRIORITIES),
        (ByPriority, lambda: Priority(PriorityConfig(preempt=True)), RUNNING),
        (Fair, FairShare, FAIRNESS),
        *[
            (DeclaredBehaviour, make, only)
            for make in (ServeInOrder, Priority, FairShare)
            for only in (SPLIT, UNIT, IDLE)
        ],
    ],
)
def test_a_promise_that_is_kept_passes(failures_of, suite, make, only) -> None:
    assert failures_of(suite, make, only=only) == set()


def test_what_is_not_declared_is_not_asked_for() -> None:
    suite = type("Suite", (DeclaredBehaviour,), {"make": staticmethod(LastComeFirst)})()
    for name in (IN_ORDER, PRIORITIES, RUNNING):
        with pytest.raises(pytest.skip.Exception, match="does not promise"):
            getattr(suite, name)()
    with pytest.raises(
        pytest.skip.Exception, match=r"does not promise fairness; one that does sets declares = frozenset"
    ):
        suite.test_declared_fairness_is_bounded((1.0, 1.0))
