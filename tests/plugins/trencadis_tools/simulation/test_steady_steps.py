"""Several steps at once give what one by one gives: same times, same steps, whatever comes in between."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulation import BLOCK_TOKENS, STEP_TIMES, asked, config_of, mixed
from trencadis.errors import StepFailedError
from trencadis.interfaces import SchedulingPolicy, SupportsSteadySteps
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_tools.simulation import ReplicaEvent, Run
from trencadis_tools.simulation.fleet import Fleet
from trencadis_tools.simulation.prompts import SimulatedPrompts
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import Workload

HERE = "tests.plugins.trencadis_tools.simulation.test_steady_steps"
POLICIES = (
    "fcfs",
    "priority",
    "shortest_first",
    "fair_share",
    "deadline",
    "prefill_first",
    "multi_level",
    "prefix_affinity",
)


class SlowHost:
    """Steps that the device waits for, for a time that depends on the step."""

    def device_s(self, shape):
        return STEP_TIMES.device_s(shape)

    def host_s(self, shape):
        return 0.005 + 1e-5 * shape.num_rows + (0.02 if shape.num_context % 7 == 0 else 0.0)


class Alternates(Fcfs):
    """Lets decodes run in every other step, and says nothing of how long that holds."""

    def __init__(self):
        super().__init__()
        self._count = 0

    def split(self, view, *, token_budget):
        self._count += 1
        split = super().split(view, token_budget=token_budget)
        return split if self._count % 2 or not view.running.size else split._replace(decode=1)


class Promises(SchedulingPolicy, SupportsSteadySteps):
    answer: ClassVar[Any] = 0

    def steady_steps(self, view):
        return self.answer


def steps_of(fleet: Fleet) -> list[tuple[int, int, tuple[tuple[int, int, int], ...]]]:
    """Return what each replica is asked to compute in each step: replica, number, and (row, start, tokens) of each sequence."""
    seen: list[Any] = []
    for replica in fleet.built:
        submit = replica.executor.submit

        def note(batch, *, submit=submit, index=replica.index):
            pending = submit(batch)
            seen.append((index, batch, pending))
            return pending

        replica.executor.submit = note
    fleet.run()
    steps = []
    for index, batch, pending in seen:
        rows = [
            tuple(row)
            for one in batch.passes
            for row in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True)
        ]
        steps += [
            (index, batch.step + number, tuple((row, start + number, length) for row, start, length in rows))
            for number in range(getattr(pending, "num_steps", 1))
        ]
    return sorted(steps)


def both(requests, tables, **options) -> tuple[Fleet, Fleet]:
    """Return fleets that step one by one, and several at once."""
    config, registry = config_of(**tables)
    workload = Workload(name="test", requests=tuple(requests), block_tokens=BLOCK_TOKENS)
    options = {"step_times": STEP_TIMES, **options}
    one, several = (Fleet(config, registry, workload, max_steady_steps=most, **options) for most in (1, 64))
    return one, several


def assert_same(one: Run, several: Run) -> None:
    """Times within 1e-9 s, all else equal."""
    for a, b in zip(one.records, several.records, strict=True):
        for name in ("sent_s", "first_token_s", "finished_s"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-9, rel=0, nan_ok=True), (
                a.request.request_id
            )
        for record in (a, b):
            if record.token_times_s is not None and not record.error:
                assert len(record.token_times_s) == record.num_output_tokens
                assert (record.token_times_s[0], record.token_times_s[-1]) == (record.first_token_s, record.finished_s)
        assert (a.token_times_s is None) == (b.token_times_s is None)
        if a.token_times_s is not None:
            assert a.token_times_s == pytest.approx(b.token_times_s, abs=1e-9, rel=0)
        moment = {**dict.fromkeys(("sent_s", "first_token_s", "finished_s"), 0.0), "token_times_s": None}
        assert attrs.evolve(a, **moment) == attrs.evolve(b, **moment)
    totals = {"records": (), "num_plans": 0, "duration_s": 0.0, "busy_s": (), "end_s": 0.0}
    assert attrs.evolve(one, **totals) == attrs.evolve(several, **totals)
    assert one.busy_s == pytest.approx(several.busy_s, abs=1e-9)


def serves(policy="fcfs", router="round_robin", **more):
    engine = {name: more.pop(name) for name in ("async_scheduling", "max_num_seqs") if name in more}
    return {
        "scheduling": {"name": policy},
        "router": {"name": router},
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, **engine},
        "cache": {"num_blocks": 128, "block_size": 4, **more},
    }


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    router=st.sampled_from(["round_robin", "prefix_affinity", "least_loaded", "power_of_two"]),
    overlaps=st.booleans(),
    num_blocks=st.sampled_from([40, 60, 128]),
    prefix_caching=st.booleans(),
    rate=st.sampled_from([5, 30, 100, 300]),
    replicas=st.integers(1, 3),
    step_times=st.sampled_from([STEP_TIMES, SlowHost(), LinearStepTimes(host_base_s=0.003, host_row_s=1e-4)]),
)
def test_times_and_totals_are_those_of_single_steps(
    seed, policy, router, overlaps, num_blocks, prefix_caching, rate, replicas, step_times
):
    tables = serves(policy, router, async_scheduling=overlaps, num_blocks=num_blocks, prefix_caching=prefix_caching)
    options = {"replicas": replicas, "step_times": step_times, "token_times": True}
    one, several = both(mixed(40, seed, rate), tables, **options)
    assert_same(one.run(), several.run())


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_is_that_of_single_steps(overlaps):
    one, several = both(mixed(40, 3, 60), serves(async_scheduling=overlaps, num_blocks=60), replicas=2)
    assert steps_of(one) == steps_of(several)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failure_in_the_middle_of_many_steps_loses_the_token_of_one(overlaps):
    requests = [asked("a", output=60), asked("b", output=50)]
    events = [ReplicaEvent(time_s=0.5, replica=0, kind="fail"), ReplicaEvent(time_s=0.9, replica=0, kind="join")]
    one, several = both(requests, serves(async_scheduling=overlaps), replicas=2, events=events, token_times=True)
    assert_same(one.run(), several.run())


def test_nothing_is_skipped_under_a_policy_that_says_nothing():
    one, several = both(mixed(20), serves(f"{HERE}:Alternates"))
    assert_same(one.run(), several.run())
    assert several.num_plans == several.num_steps


def test_a_lone_text_takes_few_plans():
    _, several = both([asked("a", output=400)], serves())
    run = several.run()
    assert run.num_steps == 400
    assert several.num_plans < 20


@pytest.mark.parametrize("answer", [0, -1, True, 2.5, None])
def test_a_promise_of_no_step_is_a_fault_of_the_policy(answer, monkeypatch):
    monkeypatch.setattr(Promises, "answer", answer)
    with pytest.raises(StepFailedError, match="steady_steps"):
        both([asked("a", output=9)], serves(f"{HERE}:Promises"))[1].run()


def test_no_more_steps_are_skipped_than_are_promised(monkeypatch):
    monkeypatch.setattr(Promises, "answer", 3)
    one, several = both([asked("a", output=40)], serves(f"{HERE}:Promises"))
    assert_same(one.run(), several.run())
    assert 40 / 3 <= several.num_plans < 20


WATCHED = {
    "a shadow policy": {"scheduling": {"name": "fcfs", "shadow": "priority"}},
    "ranks with blocks of their own": {
        "parallel": {"tensor": 2, "expert": 2, "attention": "data"},
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    },
}


@pytest.mark.parametrize("tables", WATCHED.values(), ids=WATCHED)
def test_each_step_is_planned_where_something_looks_at_it(tables):
    _, several = both([asked("a", output=40)], {**serves(), **tables})
    run = several.run()
    assert several.num_plans == run.num_steps == 40


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_engine_that_is_closed_within_a_stretch_has_no_block_left(overlaps):
    _, several = both([asked("a", output=40)], serves(async_scheduling=overlaps))
    (replica,) = several.built
    prompts = SimulatedPrompts(Workload(name="test", requests=(asked("a", output=40),), block_tokens=BLOCK_TOKENS))
    replica.engine.add(prompts.request(0))
    while not replica.engine.is_steady:
        replica.engine.step()
    replica.engine.close()
    assert not replica.engine.has_work
    assert replica.engine.inspect().blocks.num_used == 0
