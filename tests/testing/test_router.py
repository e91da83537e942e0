"""The router suite passes a small correct router and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from trencadis.interfaces import Move, Router, SupportsMoves
from trencadis_testing.router import RouterConformance, live_requests, replica_views, routing_request


class Fewest(Router):
    """Correct: the replica with the fewest requests among the healthy ones. Each mutant breaks one thing."""

    def peek(self, request, replicas):
        return int(np.where(replicas.is_healthy, replicas.num_live, 10**9).argmin())


class TestFewest(RouterConformance):
    make = Fewest


class Evens(Fewest, SupportsMoves):
    """Correct: moves the last movable request of the fullest replica to the emptiest."""

    def moves(self, live, replicas):
        to = self.peek(None, replicas)
        full = int(np.bincount(live.replica, minlength=len(replicas.num_live)).argmax())
        here = np.flatnonzero(live.is_movable & (live.replica == full))
        return [Move(int(here[-1]), to)] if here.size and full != to else []


class TestEvens(RouterConformance):
    make = Evens


class Turns(Router):
    """Correct: one after the other."""

    def __init__(self):
        self.turn = 0

    def peek(self, request, replicas):
        healthy = np.flatnonzero(replicas.is_healthy)
        return int(healthy[self.turn % len(healthy)])

    def select(self, request, replicas):
        chosen = self.peek(request, replicas)
        self.turn += 1
        return chosen


class IgnoresHealth(Router):
    def peek(self, request, replicas):
        return int(replicas.num_live.argmin())


class CountsFromOne(Fewest):
    def peek(self, request, replicas):
        return super().peek(request, replicas) + 1


class AnswersInWords(Fewest):
    def peek(self, request, replicas):
        return str(super().peek(request, replicas))


class PeekTakesTheTurn(Turns):
    def peek(self, request, replicas):
        chosen = super().peek(request, replicas)
        self.turn += 1
        return chosen


class PeekTellsAnother(Turns):
    def select(self, request, replicas):
        self.turn += 1
        return super().peek(request, replicas)


class SortsTheViews(Fewest):
    def peek(self, request, replicas):
        chosen = super().peek(request, replicas)
        replicas.num_live.sort()
        return chosen


class EveryOtherOneIsDifferent(Fewest):
    made = itertools.count()

    def __init__(self):
        self.extra = next(self.made) % 2

    def peek(self, request, replicas):
        chosen = super().peek(request, replicas)
        return int(np.flatnonzero(replicas.is_healthy)[-1]) if self.extra else chosen


class HashesNames(Router):
    def peek(self, request, replicas):
        healthy = np.flatnonzero(replicas.is_healthy)
        return int(healthy[hash(str(request.token_ids)) % len(healthy)])


class ForgetsNoReplica(Fewest):
    """Lists replicas that were added, and fails for one that was removed and never added."""

    def __init__(self):
        self.there = []

    def on_replica_added(self, replica):
        self.there.append(replica)

    def on_replica_removed(self, replica):
        self.there.remove(replica)

    def on_finished(self, request, replica):
        self.there.index(replica)


class AlwaysTheFirst(Router):
    def peek(self, request, replicas):
        return int(replicas.is_healthy.argmax())


class ComparesAllPairs(Fewest):
    def peek(self, request, replicas):
        load = replicas.num_live.tolist()
        sum(one > other for one in load for other in load)
        return super().peek(request, replicas)


class KeepsRequests(Fewest):
    def __init__(self):
        self.seen = []

    def select(self, request, replicas):
        self.seen.append(request)
        return self.peek(request, replicas)


class WatchesOnAThread(Fewest):
    def __init__(self):
        threading.Thread(target=threading.Event().wait, name="watcher", daemon=True).start()


class MovesWhatStays(Evens):
    def moves(self, live, replicas):
        to = self.peek(None, replicas)
        return [Move(i, to) for i in np.flatnonzero(live.replica != to)]


class MovesToAnyReplica(Evens):
    def moves(self, live, replicas):
        movable = np.flatnonzero(live.is_movable)
        return [(int(i), int(live.replica[i] + 1) % len(replicas.num_live)) for i in movable]


class MovesTwice(Evens):
    def moves(self, live, replicas):
        return list(super().moves(live, replicas)) * 2


class NeverAsks(Evens):
    moves_period_s = 0.0


class MovesInTurn(Evens):
    """Moves every other time that it is asked."""

    def __init__(self):
        self.turn = 0

    def moves(self, live, replicas):
        self.turn += 1
        return super().moves(live, replicas) if self.turn % 2 else []


class WritesIntoColumns(Evens):
    def moves(self, live, replicas):
        moves = super().moves(live, replicas)
        live.num_moves[:] += 1
        return moves


class KeepsWhatMoved(Evens):
    def __init__(self):
        self.seen = []

    def on_moved(self, request, replica):
        self.seen.append(request)


class MissesMoved(Evens):
    """Counts requests of replicas, and is not told of those that moved."""

    def __init__(self):
        self.there = []

    def select(self, request, replicas):
        self.there.append(chosen := self.peek(request, replicas))
        return chosen

    def on_finished(self, request, replica):
        self.there.remove(replica)


class ComparesAllRequests(Evens):
    def moves(self, live, replicas):
        tokens = live.num_output_tokens.tolist()[:3500]
        sum(one > other for one in tokens for other in tokens)
        return super().moves(live, replicas)


class Slow(Fewest):
    """Correct, and a little slow: that is what a benchmark is for; the suite lets it pass."""

    def peek(self, request, replicas):
        end = time.perf_counter() + 1e-4
        while time.perf_counter() < end:
            pass
        return super().peek(request, replicas)


MUTANTS = {
    IgnoresHealth: "test_answers_are_healthy_replicas",
    CountsFromOne: "test_answers_are_healthy_replicas",
    AnswersInWords: "test_answers_are_healthy_replicas",
    PeekTakesTheTurn: "test_a_peek_tells_the_next_choice_and_changes_nothing",
    PeekTellsAnother: "test_a_peek_tells_the_next_choice_and_changes_nothing",
    SortsTheViews: "test_views_and_requests_are_not_changed",
    EveryOtherOneIsDifferent: "test_same_calls_give_the_same_answers",
    HashesNames: "test_same_answers_in_a_process_that_hashes_differently",
    ForgetsNoReplica: "test_replicas_and_requests_come_and_go_in_any_order",
    AlwaysTheFirst: "test_no_healthy_replica_is_left_without_requests",
    ComparesAllPairs: "test_a_choice_among_a_thousand_replicas_takes_microseconds",
    KeepsRequests: "test_nothing_is_kept_of_requests_that_ended",
    MovesWhatStays: "test_moves_are_legal_and_come_as_moves",
    MovesToAnyReplica: "test_moves_are_legal_and_come_as_moves",
    MovesTwice: "test_moves_are_legal_and_come_as_moves",
    NeverAsks: "test_moves_are_legal_and_come_as_moves",
    MovesInTurn: "test_to_ask_for_moves_changes_nothing",
    WritesIntoColumns: "test_to_ask_for_moves_changes_nothing",
    KeepsWhatMoved: "test_a_move_is_followed_by_the_end_of_the_request_like_a_choice",
    MissesMoved: "test_a_move_is_followed_by_the_end_of_the_request_like_a_choice",
    ComparesAllRequests: "test_moves_of_thousands_of_requests_take_milliseconds",
    WatchesOnAThread: "test_no_thread_is_left",
}


@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
@pytest.mark.representatives(2, ci=4)
def test_suite_fails_a_broken_router(failures_of, mutant, test):
    assert failures_of(RouterConformance, mutant, only=test)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("correct", [Turns, Slow])
def test_suite_passes_what_is_correct(failures_of, correct):
    assert failures_of(RouterConformance, correct) == set()


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert set(MUTANTS.values()) == {name for name in dir(RouterConformance) if name.startswith("test_")}


def test_suite_without_make_says_what_to_do():
    with pytest.raises(NotImplementedError, match="make = YourRouter"):
        RouterConformance().make()


def test_views_are_what_was_asked_for():
    views = replica_views([3, 1], num_waiting=[2, 0], kv_usage=[0.5, 0.1], is_healthy=[True, False])
    assert (views.num_running.tolist(), views.is_healthy.tolist()) == ([1, 1], [True, False])
    assert views.hit_blocks.tolist() == [0, 0]


def test_live_requests_are_what_was_asked_for():
    live = live_requests([1, 0], num_output_tokens=[3, 0], is_movable=[False, True])
    assert (live.num_prompt_tokens.tolist(), live.num_output_tokens.tolist()) == ([10, 10], [3, 0])
    assert (live.is_movable.tolist(), live.tenants) == ([False, True], ("", ""))


def test_prompts_that_begin_alike_share_hashes():
    one, other = routing_request(range(1, 14)), routing_request([*range(1, 9), 90, 91, 92, 93, 94])
    assert one.block_hashes[:2] == other.block_hashes[:2]
    assert one.block_hashes[2] != other.block_hashes[2]
    assert routing_request(range(5), has_hashes=False).block_hashes == ()
