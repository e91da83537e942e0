"""The router suite passes a small correct router and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
import time

import numpy as np

from support.mutants import broken, leaves_a_thread, proofs
from trencadis.interfaces import Move, Router, SupportsMoves
from trencadis_testing.router import RouterConformance, routing_request


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


class MovesWhatStays(Evens):
    def moves(self, live, replicas):
        to = self.peek(None, replicas)
        return [Move(i, to) for i in np.flatnonzero(live.replica != to)]


class MovesToAnyReplica(Evens):
    def moves(self, live, replicas):
        movable = np.flatnonzero(live.is_movable)
        return [(int(i), int(live.replica[i] + 1) % len(replicas.num_live)) for i in movable]


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


class TestSlow(RouterConformance):
    make = Slow


class TestTurns(RouterConformance):
    make = Turns


MUTANTS = {
    "test_answers_are_healthy_replicas": [
        broken("IgnoresHealth", Router, peek=lambda self, request, replicas: int(replicas.num_live.argmin()))
    ],
    "test_a_peek_tells_the_next_choice_and_changes_nothing": [PeekTellsAnother],
    "test_views_and_requests_are_not_changed": [SortsTheViews],
    "test_same_calls_give_the_same_answers": [EveryOtherOneIsDifferent],
    "test_same_answers_in_a_process_that_hashes_differently": [HashesNames],
    "test_replicas_and_requests_come_and_go_in_any_order": [ForgetsNoReplica],
    "test_no_healthy_replica_is_left_without_requests": [
        broken("AlwaysTheFirst", Router, peek=lambda self, request, replicas: int(replicas.is_healthy.argmax()))
    ],
    "test_a_choice_among_a_thousand_replicas_takes_microseconds": [ComparesAllPairs],
    "test_nothing_is_kept_of_requests_that_ended": [KeepsRequests],
    "test_moves_are_legal_and_come_as_moves": [
        MovesWhatStays,
        MovesToAnyReplica,
        broken("MovesTwice", Evens, moves=lambda self, live, replicas: list(Evens.moves(self, live, replicas)) * 2),
        broken("NeverAsks", Evens, moves_period_s=0.0),
    ],
    "test_to_ask_for_moves_changes_nothing": [MovesInTurn, WritesIntoColumns],
    "test_a_move_is_followed_by_the_end_of_the_request_like_a_choice": [KeepsWhatMoved, MissesMoved],
    "test_moves_of_thousands_of_requests_take_milliseconds": [ComparesAllRequests],
    "test_no_thread_is_left": [leaves_a_thread(Fewest)],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(RouterConformance, MUTANTS)


def test_prompts_that_begin_alike_share_hashes():
    one, other = routing_request(range(1, 14)), routing_request([*range(1, 9), 90, 91, 92, 93, 94])
    assert one.block_hashes[:2] == other.block_hashes[:2]
    assert one.block_hashes[2] != other.block_hashes[2]
    assert routing_request(range(5), has_hashes=False).block_hashes == ()
