"""The results of docs/gallery/slos_serve.md: the plan is the best one, and more requests keep their objectives with it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from examples.gallery.slos_serve import planner
from examples.gallery.slos_serve.measure import (
    ATTAINMENT,
    PAPERS,
    POLICIES,
    SCENARIOS,
    Row,
    StageSlo,
    mean_capacity,
    measure,
    ratio,
    scenario,
    serve,
)
from examples.gallery.slos_serve.planner import Candidate, Room
from examples.gallery.slos_serve.policy import SlosServe
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies.gallery_pages import page_of
from trencadis.records import StepTime
from trencadis_testing.scheduling import SchedulingConformance
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.workloads import Workload

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gallery" / "slos_serve.json"


class TestSlosServe(SchedulingConformance):
    num_histories = 4
    make = SlosServe


# ----------------------------------------------------------------------------------------------------------------- the plan


def room_of(**given: Any) -> Room:
    """A step takes 10 ms, and 1 ms for each of its tokens."""
    return attrs.evolve(
        Room(step_time=StepTime(base_s=0.01, token_s=0.001, context_token_s=0.0), max_tokens=90), **given
    )


def want(within_s: float, num_tokens: int, *, num_blocks: int = 1, tpot_s: float = 0.1) -> Candidate:
    return Candidate(within_s, num_tokens, num_blocks, tpot_s)


def admitted(candidates: Sequence[Candidate], room: Room) -> list[int]:
    return planner.admitted(candidates, room)[0]


def test_all_are_admitted_whose_prompts_fit_before_their_deadlines() -> None:
    # Steps of 0.1 s have 90 tokens: 180 until 0.2 s.
    assert admitted([want(0.2, 100), want(0.2, 80)], room_of()) == [1, 0]
    assert admitted([want(0.2, 100), want(0.2, 81)], room_of()) == [1]


def test_decodes_take_their_tokens_of_every_step() -> None:
    assert admitted([want(0.2, 160)], room_of(num_decodes=10)) == [0]
    assert admitted([want(0.2, 161)], room_of(num_decodes=10)) == []
    # From 0.1 s on the first one decodes too.
    assert admitted([want(0.1, 80), want(0.2, 79)], room_of(num_decodes=10)) == [0, 1]
    assert admitted([want(0.1, 80), want(0.2, 80)], room_of(num_decodes=10)) == [1]


def test_a_tight_objective_makes_short_steps_for_all() -> None:
    # 0.2 s: two steps of 90 tokens, or four of 40.
    loose, tight = want(0.2, 170), want(0.2, 20, tpot_s=0.05)
    assert admitted([loose, tight], room_of()) == [0]
    assert admitted([want(0.2, 140), tight], room_of()) == [1, 0]
    assert admitted([loose], room_of(tpot_s=0.05)) == []


def test_no_more_are_admitted_than_can_decode_within_the_objective() -> None:
    room = room_of(num_decodes=39)
    tight = [want(9.0, 1, tpot_s=0.05), want(9.0, 1, tpot_s=0.05)]
    assert len(admitted(tight, room)) == 1
    assert len(admitted(tight, attrs.evolve(room, num_decodes=38))) == 2


def test_decodes_pause_if_more_can_be_admitted_then_and_only_then() -> None:
    # Steps of 0.05 s have 40 tokens, 10 of them of decodes; a step without them takes 0.09 s for 80.
    room = room_of(tpot_s=0.05, num_decodes=10, slack_s=0.09, max_step_s=0.1, max_tokens=1000)
    assert planner.admitted([want(0.09, 50)], room) == ([0], False)
    assert planner.admitted([want(0.09, 51)], room) == ([0], True)
    assert planner.admitted([want(0.09, 80)], room) == ([0], True)
    assert planner.admitted([want(0.09, 81)], room) == ([], False)
    # Then they go on: 60 more in 0.1 s.
    assert planner.admitted([want(0.19, 140)], room) == ([0], True)
    assert planner.admitted([want(0.19, 141)], room) == ([], False)


def feasible(chosen: Sequence[Candidate], room: Room, step_s: float, pause_s: float) -> bool:
    """Serve candidates one after the other by deadline, as the documentation of the planner says."""
    left, before, blocks = 0.0, 0.0, 0
    for number, one in enumerate(sorted(chosen)):
        until = room.prompt_tokens(one.within_s, number, step_s, pause_s=pause_s)
        left += until - (room.prompt_tokens(before, number, step_s, pause_s=pause_s) if number else 0.0)
        left, before, blocks = left - one.num_tokens, one.within_s, blocks + one.num_blocks
        if left < -1e-6 or blocks > room.num_blocks or number >= room.num_rows or not room.holds(number + 1, step_s):
            return False
    return all(one.tpot_s >= step_s for one in chosen)


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.floats(0.02, 2.0),
        st.integers(1, 1500),
        st.integers(1, 200),
        st.sampled_from([0.05, 0.1, math.inf]),
    ),
    max_size=6,
)
ROOMS = st.builds(
    Room,
    step_time=st.just(StepTime()),
    max_tokens=st.sampled_from([256, 2048]),
    num_decodes=st.integers(0, 200),
    num_context=st.integers(0, 200_000),
    tpot_s=st.sampled_from([0.05, 0.1, math.inf]),
    slack_s=st.floats(0.0, 2.0),
    max_step_s=st.sampled_from([0.1, 0.3]),
    num_blocks=st.integers(0, 600),
    num_rows=st.integers(0, 6),
    row_context=st.integers(0, 4000),
)


@settings(max_examples=150, deadline=None)
@given(CANDIDATES, ROOMS)
def test_no_set_that_meets_all_objectives_is_larger_than_the_plan(candidates: list[Candidate], room: Room) -> None:
    steps_s = {min(room.tpot_s, one.tpot_s) for one in candidates}

    def meets(chosen: Sequence[Candidate], pauses_s: Sequence[float]) -> bool:
        return not chosen or any(feasible(chosen, room, *one) for one in itertools.product(steps_s, pauses_s))

    found, pauses = planner.admitted(candidates, room)
    assert len(set(found)) == len(found)
    assert meets([candidates[index] for index in found], [room.slack_s if pauses else 0.0])
    more = itertools.combinations(candidates, len(found) + 1)
    assert not any(meets(chosen, [0.0, room.slack_s]) for chosen in more)
    if pauses:
        assert not any(meets(chosen, [0.0]) for chosen in itertools.combinations(candidates, len(found)))


# ------------------------------------------------------------------------------------------------------------ the scenarios


def test_a_request_of_several_stages_counts_if_every_stage_keeps_its_objective() -> None:
    workload = scenario("reasoning", num_requests=3)
    thought, answer = (one for one in workload.requests if one.session == workload.requests[0].session)
    assert answer.after == thought.request_id
    assert (thought.tpot_target_s, answer.tpot_target_s) == (0.05, 0.1)
    run = serve("slos_serve", workload)
    slo = StageSlo(text="", limits=(), goodput=ATTAINMENT)
    assert slo.goodput_of(run) == 1
    late = [attrs.evolve(one, first_token_s=one.sent_s + 9.0) for one in run.records if one.request == answer]
    rest = [one for one in run.records if one.request != answer]
    assert slo.goodput_of(attrs.evolve(run, records=(*rest, *late))) == pytest.approx(2 / 3)


def test_objectives_are_multiples_of_the_time_on_an_idle_device() -> None:
    workload = scenario("mixed", num_requests=6)
    alone = [attrs.evolve(one, arrival_s=100.0 * index) for index, one in enumerate(workload.requests)]
    run = serve("fcfs_512", attrs.evolve(workload, requests=tuple(alone)), **{"engine.max_num_batched_tokens": 8192})
    slow_downs = {"summarise": 3, "coder": 5, "chat": 5}
    for record in run.records:
        slow_down = slow_downs[record.request.request_id.partition(" ")[0]]
        assert record.request.ttft_target_s == pytest.approx(slow_down * record.ttft_s)


# -------------------------------------------------------------------------------------------------------------- the results


def crowded(seed: int, num_requests: int) -> Workload:
    """Conversations with short answers, of which more come than can have their first tokens in time."""
    workload = scenario("chat", seed=seed, num_requests=num_requests)
    requests = [
        attrs.evolve(one, num_output_tokens=min(one.num_output_tokens, 20), arrival_s=one.arrival_s / 8)
        for one in workload.requests
    ]
    return attrs.evolve(workload, requests=tuple(requests))


@pytest.mark.parametrize("num_requests", [20, pytest.param(40, marks=pytest.mark.nightly)])
def test_more_requests_keep_their_objectives_than_by_deadlines_alone_or_in_order_of_arrival(num_requests: int) -> None:
    slo = StageSlo(text="", limits=(), goodput=ATTAINMENT)
    policies = ("slos_serve", "deadline", "fcfs_512")
    workloads = [crowded(seed, num_requests) for seed in range(3)]
    shares = np.array([[slo.goodput_of(serve(policy, load)) for policy in policies] for load in workloads])
    assert (shares[:, :1] > shares[:, 1:]).all()
    if num_requests == 40:
        assert run_interval(shares[:, 0] - shares[:, 1]).low > 0
        assert run_interval(shares[:, 0] - shares[:, 2]).low > 0


def rows_of(name: str) -> list[Row]:
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8")) if row["scenario"] == name]


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("slos_serve")
    others = [policy for policy in POLICIES if policy != "slos_serve"]
    gains = []
    for name in SCENARIOS:
        rows = rows_of(name)
        cells = [f"{mean_capacity(rows, policy):.2f}" for policy in POLICIES]
        found = [ratio(rows, names) for names in (PAPERS, others)]
        gains.append([gain for gain, _ in found])
        cells += [f"{gain:.2f} (`{best}`)" for gain, best in found]
        assert f"| {name} | {' | '.join(cells)} |" in page
    papers, best = np.exp(np.mean(np.log(gains), axis=0))
    assert f"| geometric mean |{' |' * len(POLICIES)} {papers:.2f} | {best:.2f} |" in page


@pytest.mark.nightly
def test_kept_results_are_what_the_script_measures() -> None:
    (kept,) = [row for row in rows_of("reasoning") if (row.policy, row.seed) == ("slos_serve", 0)]
    (again,) = measure("reasoning", ["slos_serve"])
    assert again == kept
