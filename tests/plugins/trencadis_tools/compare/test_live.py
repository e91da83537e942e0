from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import pytest

from trencadis.errors import ConfigError
from trencadis_tools.compare import live
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.live import LiveRuns, pieces_of
from trencadis_tools.workloads import Workload, WorkloadRequest


class TickingClock:
    """Time passes by a millisecond whenever it is looked at, and as long as one waits."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.waits_s: list[float] = []

    def now_s(self) -> float:
        self.time_s += 0.001
        return self.time_s

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.time_s += seconds


def workload_of(*requests: dict) -> Workload:
    made = [
        WorkloadRequest(
            **{"request_id": str(index), "arrival_s": 0.0, "num_prompt_tokens": 5, "num_output_tokens": 4} | one
        )
        for index, one in enumerate(requests)
    ]
    return Workload(name="w", requests=tuple(made))


@pytest.fixture
def clock() -> TickingClock:
    return TickingClock()


@pytest.fixture
def candidate(fake_house) -> Callable[..., Candidate]:
    def make(name: str = "a", **more) -> Candidate:
        config, registry = fake_house(**more)
        return Candidate(name=name, config=config, registry=registry, given={}, plan_hash="")

    return make


def test_each_request_is_sent_at_its_time_and_ends_at_its_length(candidate, clock) -> None:
    workload = workload_of({"num_output_tokens": 3}, {"arrival_s": 5.0, "num_output_tokens": 9}, {"arrival_s": 5.0})
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs:
        (run,) = live_runs([candidate()], workload, 0)
    assert [record.num_output_tokens for record in run.records] == [3, 9, 4]
    assert [record.sent_s for record in run.records] == [0.0, 5.0, 5.0]
    assert sum(clock.waits_s) == pytest.approx(5.0, abs=0.2)
    for record in run.records:
        assert record.sent_s < record.first_token_s < record.finished_s <= run.duration_s
        assert 0 < record.tpot_s < record.ttft_s + 1
    assert run.num_steps >= 12
    assert 0 < run.busy_s[0] < run.duration_s
    assert all(record.token_times_s is None for record in run.records)


def test_each_token_has_its_time_if_that_is_asked_for(candidate, clock) -> None:
    with LiveRuns(clock=clock, wait=clock.wait, token_times=True) as live_runs:
        (run,) = live_runs([candidate()], workload_of({"num_output_tokens": 3}, {"arrival_s": 5.0}), 0)
    for record in run.records:
        times_s = record.token_times_s
        assert times_s is not None
        assert len(times_s) == record.num_output_tokens
        assert (times_s[0], times_s[-1]) == (record.first_token_s, record.finished_s)
        assert 0 < record.max_itl_s <= record.finished_s - record.first_token_s


def test_no_policy_sees_the_true_lengths(candidate, clock, monkeypatch) -> None:
    seen = []
    send = live._LiveRun._send

    def noted(self, sent_s: float, index: int, before: tuple[int, ...]) -> None:
        seen.append(self._prompts.request(index, before).params.max_tokens)
        send(self, sent_s, index, before)

    monkeypatch.setattr(live._LiveRun, "_send", noted)
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs:
        live_runs([candidate()], workload_of({"num_output_tokens": 3}, {"num_output_tokens": 9}), 0)
    assert seen == [9, 9]


def test_every_second_pair_runs_in_the_opposite_order_on_engines_that_stay(candidate, clock, monkeypatch) -> None:
    order, built = [], []
    run, build = live._LiveRun.run, live.build_engine
    monkeypatch.setattr(live._LiveRun, "run", lambda self: (order.append(id(self._engine)), run(self))[1])
    monkeypatch.setattr(live, "build_engine", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
    both = [candidate("a"), candidate("b")]
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs:
        for pair in range(3):
            live_runs(both, workload_of({}), pair)
    a, b = (id(engine) for engine in built)
    assert order == [a, b, b, a, a, b]


def test_the_next_request_of_a_session_leaves_after_the_answer_and_some_thought(candidate, clock) -> None:
    following = {"after": "0", "think_s": 2.0, "num_prompt_tokens": 15}
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs:
        (run,) = live_runs([candidate()], workload_of({}, following), 0)
    first, second = run.records
    assert second.sent_s == pytest.approx(first.finished_s + 2.0)
    assert second.num_cached_tokens == 8  # two blocks of four: prompt and answer before are 9 tokens


def test_what_is_refused_is_recorded_and_so_is_what_would_have_followed(candidate, clock) -> None:
    too_long = {"num_prompt_tokens": 300}
    after = {"after": "0", "num_prompt_tokens": 310}
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs:
        (run,) = live_runs([candidate()], workload_of(too_long, after, {}), 0)
    assert "300" in run.records[0].error
    assert run.records[1].error == "not sent: 0 failed"
    assert math.isnan(run.records[0].finished_s)
    assert run.records[2].error == ""


def test_a_model_that_only_embeds_is_refused(candidate, clock) -> None:
    with LiveRuns(clock=clock, wait=clock.wait) as live_runs, pytest.raises(ConfigError, match="only embeds"):
        live_runs([candidate(generates=False)], workload_of({}), 0)


def test_pieces_of_a_trace_begin_at_zero_and_keep_its_gaps(make_workload) -> None:
    workload = make_workload(num=10)
    pieces = pieces_of(workload, 3)
    assert [len(piece.requests) for piece in pieces] == [3, 3, 3]
    assert [piece.requests[0].arrival_s for piece in pieces] == [0.0] * 3
    gaps = [one.arrival_s - workload.requests[3].arrival_s for one in workload.requests[3:6]]
    assert [one.arrival_s for one in pieces[1].requests] == pytest.approx(gaps)
    assert [piece.seed for piece in pieces] == [0, 1, 2]
    with pytest.raises(ConfigError, match="10 requests are too few for 11 pieces"):
        pieces_of(workload, 11)
    with pytest.raises(ConfigError, match="follow each other"):
        pieces_of(workload_of({}, {"after": "0", "num_prompt_tokens": 15}), 1)
    assert attrs.evolve(pieces[0].requests[1], arrival_s=0.0).num_prompt_tokens == 10
