"""Guard of a router, prefix index, restart limit, merged pages and answers."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import EngineEndedError, InvalidRequestError
from trencadis.faults import CallMeter
from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.replicas.answers import Gathering, Pages, gather_answers
from trencadis_remote.replicas.guarded_router import GuardedRouter, LeastLive
from trencadis_remote.replicas.pages import merge_pages
from trencadis_remote.replicas.prefix_index import PrefixIndex
from trencadis_testing.router import RouterConformance, replica_views, routing_request

REQUEST = routing_request()
VIEWS = replica_views([5, 3, 4], is_healthy=[True, False, True])


class TestLeastLive(RouterConformance):
    make = LeastLive


class Answers(Router):
    """Gives one answer, whatever it is."""

    def __init__(self, answer: Any = 0) -> None:
        self.answer = answer
        self.told: list[Any] = []

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]

    def on_finished(self, request: RoutingRequest, replica: int) -> None:
        self.told.append(("finished", replica))

    def on_replica_added(self, replica: int) -> None:
        self.told.append(("added", replica))


@pytest.mark.representatives(3)
@pytest.mark.parametrize("answer", [1, 3, -1, "0", 0.0, None, True, ValueError("no")])
def test_an_answer_that_is_no_healthy_replica_puts_the_fallback_in_place(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guarded, fallback = GuardedRouter("router mine", Answers(answer), lambda: fallback), Answers(2)
    guarded.on_replica_added(0)
    guarded.on_replica_added(2)
    assert guarded.ask.select(REQUEST, VIEWS) == 2
    assert guarded.num_quarantined == 1
    assert fallback.told == [("added", 0), ("added", 2)]
    assert "router mine" in caplog.text
    guarded.on_finished(REQUEST, 0, generation=0)  # the fallback did not choose it
    guarded.on_finished(REQUEST, 2, generation=1)
    assert fallback.told[2:] == [("finished", 2)]


def test_the_least_loaded_replica_stands_in_for_routers_that_all_failed() -> None:
    guarded = GuardedRouter("router mine", Answers(7), lambda: Answers(ValueError("no")))
    assert [guarded.ask.select(REQUEST, VIEWS), guarded.ask.peek(REQUEST, VIEWS)] == [2, 2]
    assert guarded.num_quarantined == 2
    alone = GuardedRouter("router mine", Answers(7))
    assert alone.ask.select(REQUEST, VIEWS) == 2
    assert alone.label == "the least loaded replica (fallback of router mine)"


def test_a_router_that_takes_too_long_is_replaced_after_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()

    class Slow(Answers):
        def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
            clock.advance(5.0)
            return 0

    meter = CallMeter("router slow", clock=clock, budget_s=0.2, setting="[budget] router_ms")
    guarded = GuardedRouter("router slow", Slow(), meter=meter)
    caplog.set_level(logging.WARNING)
    assert [guarded.ask.select(REQUEST, VIEWS), guarded.ask.select(REQUEST, VIEWS)] == [0, 2]
    assert "router_ms" in caplog.text


# ---------------------------------------------------------------------------------------------------- prefix index


@pytest.mark.parametrize("num_replicas", [1, 3, 70])
def test_hits_are_those_of_sets_of_hashes(num_replicas: int) -> None:
    rng, index = random.Random(num_replicas), PrefixIndex(num_replicas)
    cached: list[set[bytes]] = [set() for _ in range(num_replicas)]
    live: list[tuple[int, tuple[bytes, ...]]] = []
    out = np.full(num_replicas, 9, np.int32)
    names = [bytes([one]) for one in range(24)]
    for _ in range(800):
        replica, chain = rng.randrange(num_replicas), tuple(rng.sample(names, rng.randrange(1, 6)))
        match rng.randrange(5):
            case 0 | 1:
                gone = rng.sample(names, 2)
                index.update(replica, added=chain, removed=[one for one in gone if one not in chain])
                cached[replica] |= set(chain)
                cached[replica] -= set(gone) - set(chain)
            case 2:
                index.expect(replica, chain)
                live.append((replica, chain))
            case 3 if live:
                index.forget(*live.pop(rng.randrange(len(live))))
            case 4 if rng.random() < 0.1:
                index.drop(replica)
                cached[replica].clear()
        asked = rng.sample(names, 5)
        index.hits(asked, out)
        for i in range(num_replicas):
            has = cached[i].union(*(set(hashes) for who, hashes in live if who == i))
            assert out[i] == next((depth for depth, one in enumerate(asked) if one not in has), len(asked))
    for one in live:
        index.forget(*one)
    for replica in range(num_replicas):
        index.drop(replica)
    assert len(index) == 0


# --------------------------------------------------------------------------------------------- answers and metrics


def test_pages_become_one_with_a_label() -> None:
    first = '# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n# HELP h H.\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_sum 3\n'
    second = '# HELP h H.\n# TYPE h histogram\nh_bucket{le="1"} 4\nh_sum 5\nnum 7\n'
    assert merge_pages({0: first, 2: second}).splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="0"} 1.0',
        "# HELP h H.",
        "# TYPE h histogram",
        'h_bucket{replica="0",le="1"} 2',
        'h_sum{replica="0"} 3',
        'h_bucket{replica="2",le="1"} 4',
        'h_sum{replica="2"} 5',
        'num{replica="2"} 7',
    ]
    assert merge_pages({}) == ""


def test_a_replica_that_does_not_answer_is_shown_as_it_was() -> None:
    pages = Pages()
    assert pages.begin(0)
    pages.put(0, "num 1\n")
    assert pages.begin(0)
    assert not pages.begin(0)  # the next scrape: the last one has no answer yet
    assert pages.merged("own 1\n") == 'num{replica="0"} 1\nown 1\n'
    pages.drop(0)
    assert pages.merged("") == ""


def test_all_that_were_asked_are_waited_for_and_those_that_end_are_not() -> None:
    done: list[int] = []
    gathering = Gathering({0, 1}, lambda: done.append(1))
    gathering.done(0)
    assert not done
    gathering.done(1)
    gathering.done(1)
    assert done == [1]
    Gathering(set(), lambda: done.append(2))
    assert done == [1, 2]


def test_totals_are_sums_and_a_change_fails_if_one_fails() -> None:
    error = InvalidRequestError("no")
    totals = {
        0: {"num_steps": 3, "drafter": "x", "more": {"n": 1}},
        1: {"num_steps": 4, "drafter": "x", "more": {"n": 2}},
    }
    assert gather_answers("totals", totals) == {"num_steps": 7, "drafter": "x", "more": {"n": 3}}  # type: ignore[arg-type]
    assert gather_answers("set_role", {0: {"num_live": 2, "role": "both"}, 1: {"num_live": 3, "role": "both"}}) == {
        "num_live": 5,
        "role": "both",
    }
    assert gather_answers("set_scheduling", {0: {"policy": "a"}, 1: error}) is error
    assert gather_answers("explain", {0: error, 1: {"requests": []}}) == {"requests": []}
    assert gather_answers("explain", {0: error, 1: InvalidRequestError("neither")}) is error
    assert isinstance(gather_answers("scheduling", {}), EngineEndedError)


def test_flight_records_of_all_replicas_are_named():
    answers = {1: {"paths": ["b"]}, 0: {"paths": ["a"]}}
    assert gather_answers("flight_record", answers) == {"paths": ["a", "b"]}
