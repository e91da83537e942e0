"""The scheduling suite passes what keeps the contract and fails every planted fault."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from support.mutants import broken, leaves_a_thread, proofs
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

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates) -> int:
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


class ChangesTheView(SchedulingPolicy):
    def order(self, view: SchedulerView):
        view.priority[view.waiting] = 0
        return view.waiting


class SaysNothingOfTenants(SchedulingPolicy):
    """A policy that returns None where it has no objection."""

    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int):
        return None


class SaysYesToTenants(SchedulingPolicy):
    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int):
        return True


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


class CountsOnBeingToldOfTheEnd(SchedulingPolicy):
    """Keeps a book of slots that on_finished of an aborted sequence does not find."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def order(self, view: SchedulerView):
        self.seen.update(view.waiting.tolist())
        return view.waiting

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        self.seen.remove(slot)


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


MUTANTS = {
    "test_a_step_costs_no_more_than_sorting_those_that_wait": [ComparesAllWithAll],
    "test_nothing_is_kept_of_requests_that_ended": [RemembersEveryRequest],
    "test_no_thread_is_left": [leaves_a_thread(SchedulingPolicy)],
    "test_same_work_gives_the_same_plans": [
        broken(
            "GlobalRandom",
            SchedulingPolicy,
            chunk=lambda self, view, *, slot, num_remaining, token_budget: random.randint(
                1, min(num_remaining, token_budget)
            ),
        )
    ],
    "test_nobody_starves_behind_newcomers": [StarvesOne],
    "test_plans_do_not_depend_on_what_texts_will_be": [PeeksAtTheOutput],
    "test_giving_way_comes_to_rest": [
        broken(
            "GivesWayToAnybody",
            SchedulingPolicy,
            preempts=True,
            preempt_for=lambda self, view, *, slot, candidates: int(candidates[0]),
        )
    ],
    "test_nobody_is_lost_and_all_work_ends": [
        broken(
            "PushesOutWhoDoesNotRun",
            SchedulingPolicy,
            preempts=True,
            preempt_for=lambda self, view, *, slot, candidates: slot,
        ),
        broken(
            "IdlesWhenOneRuns",
            SchedulingPolicy,
            split=lambda self, view, *, token_budget: (
                TokenSplit(0, 0) if view.running.size == 1 else TokenSplit(token_budget, token_budget)
            ),
        ),
    ],
    "test_any_history_keeps_the_invariants": [CountsOnBeingToldOfTheEnd],
    "test_preempted_sequences_come_back": [
        broken(
            "WrongVictim",
            SchedulingPolicy,
            victim=lambda self, view, *, candidates: int(view.waiting[0]) if view.waiting.size else -1,
        )
    ],
    "test_every_text_is_what_first_come_first_served_would_give": [ChangesTheView],
    "test_it_refuses_nobody_unless_it_says_so": [
        broken(
            "RefusesQuietly",
            SchedulingPolicy,
            admit=lambda self, request, *, num_waiting, num_waiting_tokens: "full" if num_waiting > 2 else "",
        ),
        SaysNothingOfTenants,
        SaysYesToTenants,
    ],
}

test_suite_fails_what_is_broken, _ = proofs(Small, MUTANTS)


class SmallThatRefuses(Small):
    may_refuse = True


@pytest.mark.parametrize("test", ["test_any_history_keeps_the_invariants", "test_nobody_is_lost_and_all_work_ends"])
def test_policy_that_may_refuse_may_not_fail_instead(failures_of, test) -> None:
    assert failures_of(SmallThatRefuses, SaysNothingOfTenants, only=test)


class RefusesByHash(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "no room" if hash(request.request_id) % 2 else ""


class Refuses(SchedulingConformance):
    may_refuse = True


def test_policy_that_goes_by_the_order_of_hashes_is_found_by_another_process(failures_of) -> None:
    other = "test_same_work_gives_the_same_plans_in_a_process_that_hashes_differently"
    assert failures_of(Refuses, RefusesByHash, only=other)
    assert not failures_of(Refuses, RefusesByHash, only="test_same_work_gives_the_same_plans")
