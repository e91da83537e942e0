"""The scheduling suite passes what keeps the contract and fails every planted fault."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time

import numpy as np
import pytest

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Request
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.scheduling import SchedulingConformance


class InOrder(SchedulingConformance):
    make = ServeInOrder


class TestServeInOrder(InOrder):
    num_histories = 10
    num_rules = 25


class ShortestFirst(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.num_tokens[view.waiting], kind="stable")]

    def victim(self, view: SchedulerView, *, candidates):
        return int(candidates[np.argmax(view.num_blocks[candidates])])


class TestShortestFirst(SchedulingConformance):
    make = ShortestFirst
    num_histories = 10
    num_rules = 25


class Urgent(SchedulingPolicy):
    """Lets running sequences give way to those of a smaller priority number."""

    preempts = True

    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.priority[view.waiting], kind="stable")]

    def give_way(self, view: SchedulerView, *, slot: int, candidates) -> int:
        worst = int(candidates[np.argmax(view.priority[candidates])])
        return worst if view.priority[worst] > view.priority[slot] else -1


class TestUrgent(SchedulingConformance):
    make = Urgent
    num_histories = 15
    num_rules = 25


class Small(SchedulingConformance):
    """The suite at a size for planted faults."""

    num_histories = 5
    num_rules = 25

    def test_same_work_gives_the_same_plans_in_a_process_that_hashes_differently(self) -> None:
        """Has a mutant of its own: two processes for each of the others would be many."""


class DropsOne(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[1:]


class DoublesOne(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return np.append(view.waiting, view.waiting[:1])


class GlobalDice(SchedulingPolicy):
    _calls = itertools.count()

    def order(self, view: SchedulerView):
        order = view.waiting.tolist()
        random.Random(next(self._calls)).shuffle(order)
        return np.array(order, np.int32)


class NeverPrefills(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return 0


class NeverDecodes(SchedulingPolicy):
    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(0, token_budget)


class OverBudget(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return num_remaining


class WrongVictim(SchedulingPolicy):
    def victim(self, view: SchedulerView, *, candidates):
        return int(view.waiting[0]) if view.waiting.size else -1


class ChangesTheView(SchedulingPolicy):
    def order(self, view: SchedulerView):
        view.priority[view.waiting] = 0
        return view.waiting


class SortsInPlace(SchedulingPolicy):
    def order(self, view: SchedulerView):
        view.waiting.sort()
        return view.waiting


class RefusesQuietly(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "full" if num_waiting > 2 else ""


class SaysNothingOfTenants(SchedulingPolicy):
    """A policy that returns None where it has no objection."""

    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int):
        return None


class SaysYesToTenants(SchedulingPolicy):
    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int):
        return True


class ForgetsReusedSlots(SchedulingPolicy):
    """Remembers slots it has seen and puts them last for good: breaks when a slot is reused."""

    def __init__(self) -> None:
        self.transfer_ids: dict[int, int] = {}

    def order(self, view: SchedulerView):
        for slot in view.waiting.tolist():
            if slot in self.transfer_ids and view.num_preemptions[slot] == 0 and self.transfer_ids[slot] != id(view):
                raise RuntimeError("this slot ended long ago")
            self.transfer_ids[slot] = id(view)
        return view.waiting


class WallClock(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return np.random.default_rng(time.perf_counter_ns()).permutation(view.waiting)


class GlobalRandom(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return random.randint(1, min(num_remaining, token_budget))


class StarvesOne(SchedulingPolicy):
    """Never gives tokens to the longest prompts while anybody else runs."""

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        others = view.running.size and view.num_tokens[view.running].max() <= view.num_tokens[slot]
        return 0 if others and view.num_tokens[slot] >= 40 else min(num_remaining, token_budget)


class PeeksAtTheOutput(SchedulingPolicy):
    """Finds the backend where it was made and works out how long each text will be."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.backend = sys._getframe(1).f_locals.get("backend") or FakeBackend()

    def on_added(self, *, slot: int, request: Request) -> None:
        sizes = {"vocab_size": self.backend._vocab_size, "eos": self.backend._eos}
        self.lengths[slot] = len(fake_text(request.prompt_token_ids, 40, **sizes))

    def order(self, view: SchedulerView):
        return np.array(sorted(view.waiting.tolist(), key=lambda slot: self.lengths[slot]), np.int32)


class KeepsTheView(SchedulingPolicy):
    """Answers from the first view it saw."""

    first = None

    def order(self, view: SchedulerView):
        self.first = view.waiting if self.first is None else self.first
        return self.first


class NegativeBudget(SchedulingPolicy):
    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(token_budget, token_budget - 2 * len(view.waiting) * token_budget)


class GivesWayToAnybody(SchedulingPolicy):
    """Whoever waits pushes out who runs, who pushes back."""

    preempts = True

    def give_way(self, view: SchedulerView, *, slot: int, candidates) -> int:
        return int(candidates[0])


class PushesOutWhoDoesNotRun(SchedulingPolicy):
    preempts = True

    def give_way(self, view: SchedulerView, *, slot: int, candidates) -> int:
        return slot


class CountsOnBeingToldOfTheEnd(SchedulingPolicy):
    """Keeps a book of slots that on_finished of an aborted sequence does not find."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def order(self, view: SchedulerView):
        self.seen.update(view.waiting.tolist())
        return view.waiting

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        self.seen.remove(slot)


class IdlesWhenOneRuns(SchedulingPolicy):
    """Neither decodes nor admits while exactly one sequence runs."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(0, 0) if view.running.size == 1 else TokenSplit(token_budget, token_budget)


class ComparesAllWithAll(SchedulingPolicy):
    def order(self, view: SchedulerView):
        waiting = view.waiting
        slots = waiting.tolist()
        ranks = [sum(other < slot for other in slots) for slot in slots]
        return waiting[np.argsort(ranks, kind="stable")]


class RemembersEveryRequest(SchedulingPolicy):
    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}

    def on_added(self, *, slot: int, request: Request) -> None:
        self.lengths[request.request_id] = len(request.prompt_token_ids)


class ThinksOnAThread(SchedulingPolicy):
    def __init__(self) -> None:
        threading.Thread(target=threading.Event().wait, name="thinker", daemon=True).start()


MUTANTS = {
    ComparesAllWithAll: "test_a_step_costs_no_more_than_sorting_those_that_wait",
    RemembersEveryRequest: "test_nothing_is_kept_of_requests_that_ended",
    ThinksOnAThread: "test_no_thread_is_left",
    WallClock: "test_same_work_gives_the_same_plans",
    GlobalRandom: "test_same_work_gives_the_same_plans",
    StarvesOne: "test_nobody_starves_behind_newcomers",
    PeeksAtTheOutput: "test_plans_do_not_depend_on_what_texts_will_be",
    KeepsTheView: "test_nobody_is_lost_and_all_work_ends",
    NegativeBudget: "test_every_text_is_what_first_come_first_served_would_give",
    GivesWayToAnybody: "test_giving_way_comes_to_rest",
    PushesOutWhoDoesNotRun: "test_nobody_is_lost_and_all_work_ends",
    CountsOnBeingToldOfTheEnd: "test_any_history_keeps_the_invariants",
    IdlesWhenOneRuns: "test_nobody_is_lost_and_all_work_ends",
    DropsOne: "test_nobody_is_lost_and_all_work_ends",
    DoublesOne: "test_nobody_is_lost_and_all_work_ends",
    GlobalDice: "test_same_work_gives_the_same_plans",
    NeverPrefills: "test_nobody_is_lost_and_all_work_ends",
    NeverDecodes: "test_nobody_is_lost_and_all_work_ends",
    OverBudget: "test_nobody_is_lost_and_all_work_ends",
    WrongVictim: "test_preempted_sequences_come_back",
    ChangesTheView: "test_every_text_is_what_first_come_first_served_would_give",
    SortsInPlace: "test_every_text_is_what_first_come_first_served_would_give",
    RefusesQuietly: "test_it_refuses_nobody_unless_it_says_so",
    SaysNothingOfTenants: "test_it_refuses_nobody_unless_it_says_so",
    SaysYesToTenants: "test_it_refuses_nobody_unless_it_says_so",
    ForgetsReusedSlots: "test_any_history_keeps_the_invariants",
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_planted_fault_is_found(failures_of, mutant, test) -> None:
    assert failures_of(Small, mutant, only=test)


class SmallThatRefuses(Small):
    may_refuse = True


@pytest.mark.parametrize("mutant", [SaysNothingOfTenants, SaysYesToTenants])
@pytest.mark.parametrize("test", ["test_any_history_keeps_the_invariants", "test_nobody_is_lost_and_all_work_ends"])
def test_policy_that_may_refuse_may_not_fail_instead(failures_of, mutant, test) -> None:
    assert failures_of(SmallThatRefuses, mutant, only=test)


class RefusesByHash(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "no room" if hash(request.request_id) % 2 else ""


class Refuses(SchedulingConformance):
    may_refuse = True


def test_policy_that_goes_by_the_order_of_hashes_is_found_by_another_process(failures_of) -> None:
    other = "test_same_work_gives_the_same_plans_in_a_process_that_hashes_differently"
    assert failures_of(Refuses, RefusesByHash, only=other)
    assert not failures_of(Refuses, RefusesByHash, only="test_same_work_gives_the_same_plans")
