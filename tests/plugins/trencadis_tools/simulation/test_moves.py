from __future__ import annotations

import math
import random
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulation import BLOCK_TOKENS, STEP_TIMES, asked, config_of, mixed, run
from trencadis.interfaces import Move, Router, SupportsMoves
from trencadis_tools.simulation import ReplicaEvent
from trencadis_tools.simulation.fleet import Fleet
from trencadis_tools.workloads import Workload

HERE = "tests.plugins.trencadis_tools.simulation.test_moves"
SERIAL = {"engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False}}


class Once(Router, SupportsMoves):
    """All to replica 0; after a period its first request is moved to replica 1, once."""

    moves_period_s = 0.05
    shown: ClassVar[list] = []

    def __init__(self):
        type(self).shown = []

    def peek(self, request, replicas):
        return int(replicas.is_healthy.argmax())

    def moves(self, live, replicas):
        self.shown.append((live.num_output_tokens.tolist(), live.replica.tolist(), replicas.num_live.tolist()))
        return [] if live.num_moves.any() else [Move(0, 1)]


class Shuffles(Once):
    """Draws what moves where from what it sees."""

    moves_period_s = 0.03

    def moves(self, live, replicas):
        seen = (live.num_output_tokens.tolist(), live.replica.tolist(), replicas.num_waiting.tolist())
        self.shown.append((seen, replicas.num_running.tolist(), replicas.kv_usage.tolist()))
        draws = random.Random(str(seen))
        return [Move(draws.randrange(len(live.replica)), draws.randrange(3)) for _ in range(3)]


class Fails(Once):
    def moves(self, live, replicas):
        raise ValueError("no")


class Elsewhere(Once):
    """Moves off replicas that are to take nothing new."""

    def moves(self, live, replicas):
        to = int(replicas.is_healthy.argmax())
        return [Move(i, to) for i, at in enumerate(live.replica.tolist()) if not replicas.is_healthy[at]]


def routed(name, **more):
    return {"router": {"name": f"{HERE}:{name}", **more}, **SERIAL}


def step_s(num_tokens, context):
    """Of a prompt's tokens, or of one token that reads some."""
    return 0.02 + 1e-4 * num_tokens + 1e-6 * context


def test_a_move_waits_for_the_end_of_the_step_and_costs_the_prompt_and_what_came_anew():
    """The period of 0.05 s ends in the third step: a has left with three tokens, and 20 + 3 are computed on replica 1."""
    moved = run([asked("a", output=9)], routed("Once"), replicas=2)
    stayed = run([asked("a", output=9)], SERIAL)
    left_s = step_s(20, 20) + step_s(1, 21) + step_s(1, 22)
    ((one,), (other,)) = moved.records, stayed.records
    assert 0.05 < left_s < 0.07
    assert one.finished_s == pytest.approx(left_s + step_s(23, 23) + sum(step_s(1, 20 + i) for i in range(4, 9)))
    assert one.first_token_s == other.first_token_s
    assert (one.replica, one.num_output_tokens, moved.num_rebalanced, moved.num_moved) == (1, 9, 1, 0)
    assert moved.busy_s == pytest.approx((left_s, one.finished_s - left_s))
    assert Once.shown[0] == ([2], [0], [1, 0])
    assert Once.shown[1][1:] == ([1], [0, 1])


def test_one_that_waits_moves_at_the_end_of_the_step_that_runs_without_it():
    requests = [asked(f"r{i}", output=30) for i in range(4)] + [asked("late", 0.01, output=3)]
    waits = run(requests, routed("Fails", max_moves=0), replicas=2).records[4]

    alone = run(requests, routed("MovesTheLast"), replicas=2).records[4]
    assert waits.ttft_s > 0.6
    assert alone.ttft_s < 0.2
    assert alone.replica == 1


class MovesTheLast(Once):
    def moves(self, live, replicas):
        return [Move(len(live.replica) - 1, 1)] if len(live.replica) == 5 else []


def fleet_of(max_steady_steps, requests, *, events=(), **tables):
    config, registry = config_of(**tables)
    workload = Workload(name="test", requests=tuple(requests), block_tokens=BLOCK_TOKENS)
    fleet = Fleet(
        config,
        registry,
        workload,
        step_times=STEP_TIMES,
        replicas=3,
        events=events,
        max_steady_steps=max_steady_steps,
        token_times=True,
    )
    try:
        return fleet, fleet.run()
    finally:
        fleet.close()


@pytest.mark.parametrize("tables", [{}, SERIAL], ids=["async", "serial"])
def test_steps_at_once_are_steps_one_by_one_with_moves(tables):
    draws, time_s, requests = random.Random(2), 0.0, []
    for i in range(12):
        time_s += draws.expovariate(4.0)
        requests.append(asked(f"r{i}", time_s, draws.randint(4, 40), draws.randint(5, 60)))
    tables = {**tables, "router": {"name": f"{HERE}:Shuffles", "max_moves": 9}}
    single, one = fleet_of(1, requests, **tables)
    seen = Shuffles.shown
    several, other = fleet_of(64, requests, **tables)
    assert Shuffles.shown == seen
    assert several.num_plans < single.num_plans
    assert one.num_rebalanced == other.num_rebalanced > 10
    assert one.num_refused_moves == other.num_refused_moves > 0
    for a, b in zip(one.records, other.records, strict=True):
        assert (a.num_output_tokens, a.replica) == (b.num_output_tokens, b.replica)
        assert abs(a.finished_s - b.finished_s) < 1e-9
        assert abs(a.first_token_s - b.first_token_s) < 1e-9
        assert a.token_times_s == pytest.approx(b.token_times_s, abs=1e-9, rel=0)


@given(st.integers(0, 10**6), st.integers(0, 2), st.floats(0.1, 2.0))
@settings(max_examples=6, deadline=None)
def test_every_request_is_answered_whole_whatever_moves_and_fails(seed, replica, fails_s):
    events = [
        ReplicaEvent(time_s=fails_s, replica=replica, kind="fail"),
        ReplicaEvent(time_s=fails_s + 0.5, replica=replica, kind="join"),
    ]
    requests = mixed(16, seed=seed)
    table = {"name": f"{HERE}:Shuffles", "max_moves": 30, "max_moves_per_s": 1000.0}
    _, one = fleet_of(64, requests, router=table, events=events)
    assert [record.num_output_tokens for record in one.records] == [asked.num_output_tokens for asked in requests]
    assert not any(record.error or math.isnan(record.first_token_s) for record in one.records)
    assert one.num_rebalanced > 0
    for record in one.records:
        times_s = record.token_times_s
        assert len(times_s) == record.num_output_tokens
        assert (times_s[0], times_s[-1]) == (record.first_token_s, record.finished_s)
        assert (times_s[1:] >= times_s[:-1]).all()


def test_a_replica_that_is_drained_can_be_emptied_at_once():
    requests = [asked(f"r{i}", output=60) for i in range(3)]
    events = [ReplicaEvent(time_s=0.2, replica=0, kind="drain")]
    emptied = run(requests, routed("Elsewhere"), replicas=2, events=events)
    assert [record.replica for record in emptied.records] == [1, 1, 1]
    assert emptied.busy_s[0] < 0.4 < emptied.busy_s[1]
    assert emptied.num_rebalanced == 3
