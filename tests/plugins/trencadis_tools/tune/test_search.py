"""The search on problems whose answer is known."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest

from support.simulation import asked
from trencadis.errors import ConfigError, StepFailedError
from trencadis.interfaces import SchedulingPolicy
from trencadis_tools.compare.candidates import restored
from trencadis_tools.simulation import DraftFacts
from trencadis_tools.tune.search import Found, Parts, search
from trencadis_tools.tune.slo import parse_slo
from trencadis_tools.tune.space import Space
from trencadis_tools.tune.trials import Trials, capacity_of
from trencadis_tools.workloads import Workload

START = {
    "scheduling.name": "fcfs",
    "engine.max_num_batched_tokens": 2048,
    "engine.async_scheduling": False,
    "cache.num_blocks": 4000,
}
PROMPT = 384
HERE = "tests.plugins.trencadis_tools.tune.test_search"


class Fails(SchedulingPolicy):
    def order(self, waiting):
        raise RuntimeError("no order today")


@attrs.frozen
class Knee:
    """Up to 512 tokens a step takes 50 ms, and 2 ms more for each token beyond: no other budget computes prompts as fast."""

    def device_s(self, shape):
        return 0.05 + 0.002 * max(0, shape.num_tokens - 512) if shape.num_tokens else 0.0

    def host_s(self, shape):
        return 0.0


class FourTokens:
    """A step takes 20 ms, and 100 ms more if a decoding sequence has more than four tokens in it."""

    def device_s(self, shape):
        return 0.02 + 0.1 * (shape.num_decode_tokens > 4 * shape.num_decodes) if shape.num_tokens else 0.0

    def host_s(self, shape):
        return 0.0


def workload(name: str, num_requests: int = 28, prompt: int = PROMPT, output: int = 1) -> Workload:
    """Return requests at a rate of 1, which share nothing."""
    return Workload(
        name=name,
        requests=tuple(asked(str(i), float(i), prompt, output, max_tokens=output) for i in range(num_requests)),
    )


def searched(
    slo: str = "ttft_p99=1s", *, budget: int = 26, keep: tuple[str, ...] = ("scheduling",), **start: Any
) -> tuple[Found, Trials]:
    candidate = restored("start", {**START, **start})
    objectives = parse_slo(slo)
    parts = [workload("short", 20), workload("long", 28), workload("other", prompt=PROMPT + 16)]
    trials = Trials(candidate, objectives, Knee(), parts)
    space = Space(candidate.config, candidate.registry, slo=objectives, step_times=Knee(), shares=False, keep=keep)
    return search(space, trials, Parts(rungs=("short", "long"), held_out="other"), hint=1.0, budget=budget), trials


@functools.cache
def found() -> tuple[Found, Trials, int]:
    """Return what a search found, its trials, to which tests add, and how many there were."""
    result, trials = searched()
    return result, trials, trials.num_run


def test_the_token_budget_at_the_knee_is_found_and_nothing_else_is_changed_within_the_budget_of_trials() -> None:
    result, _, num_trials = found()
    assert result.best.changes == {"engine.max_num_batched_tokens": 512}
    # 512 tokens in 50 ms are 25.6 prompts of 400 tokens a second; a burst of 28 may take a second for its first tokens, and 20 steps are one.
    assert result.best.rate > 25.6 * 0.95
    # At most 2048 tokens in 3.122 s: two prompts that meet in a step make both late.
    assert 0 < result.start.rate < result.best.rate / 2
    assert list(result.alone) == ["engine.max_num_batched_tokens"]
    assert result.alone["engine.max_num_batched_tokens"].rate == pytest.approx(result.best.rate, rel=0.03)
    matters = {effect.option.path: effect.matters for effect in result.effects}
    assert (matters["engine.max_num_batched_tokens"], matters["engine.preemption"]) == (True, False)
    stages = dict(result.stages)
    assert stages["one step at a time"] <= 26
    assert stages["check"] == num_trials


def test_the_same_search_gives_the_same_trials() -> None:
    (result, trials), (again, others) = (searched("ttft_p99=10ms", budget=8) for _ in range(2))
    assert again == result
    assert list(trials.trials.items()) == list(others.trials.items())


def test_a_start_at_the_optimum_stays() -> None:
    result, _ = searched(budget=20, **{"engine.max_num_batched_tokens": 512})
    assert result.best.changes == {}
    assert result.best.rate == result.start.rate


def test_objectives_that_no_rate_keeps_give_the_nearest() -> None:
    result, _ = searched("ttft_p99=10ms", budget=8)
    assert result.best.rate == result.start.rate == 0
    assert result.best.nearest.strain == pytest.approx(5)  # a prompt alone takes 50 ms


def test_objectives_that_all_requests_at_once_keep_are_refused() -> None:
    with pytest.raises(ConfigError, match="even if all of them come at once"):
        searched("ttft_p99=1000s", budget=12)


def test_capacity_lies_between_two_rates_that_differ_by_the_tolerance() -> None:
    trials = found()[1]
    capacity = capacity_of(trials, {}, "long", hint=3.0, tolerance=0.02)
    assert capacity is not None
    assert capacity.within is not None
    assert capacity.beyond is not None
    assert capacity.within.keeps
    assert not capacity.beyond.keeps
    assert capacity.within.rate < capacity.beyond.rate <= 1.021 * capacity.within.rate


def test_changes_that_no_engine_can_be_built_with_are_counted_once() -> None:
    trials = Trials(restored("start", START), parse_slo("ttft_p99=1s"), Knee(), [workload("short")])
    changes = {"engine.max_num_seqs": 0}
    assert trials.run(changes, "short", 1.0) is None
    assert capacity_of(trials, changes, "short", hint=1.0) is None
    ((refused, why),) = trials.refused
    assert refused == changes
    assert "max_num_seqs" in why
    assert trials.num_run == 0


def test_a_start_that_fails_is_an_error() -> None:
    start = restored("start", {**START, "scheduling.name": f"{HERE}:Fails"}, may_import=True)
    trials = Trials(start, parse_slo("ttft_p99=1s"), Knee(), [workload("short")])
    with pytest.raises(StepFailedError, match="no order today"):
        trials.run({}, "short", 1.0)


def drafting() -> tuple[Space, Trials]:
    """An engine that runs one request after the other with one draft, each of which is right."""
    drafts = {"speculation.name": "ngram", "speculation.ngram.max_draft_tokens": 1, "draft_length.name": "fixed"}
    start = {**START, **drafts, "engine.max_num_seqs": 1}
    candidate, slo = restored("start", start), parse_slo("e2e_p99=1s")
    parts = [workload("short", 20, 16, 13), workload("other", 20, 17, 13)]
    times = FourTokens()
    trials = Trials(candidate, slo, times, parts, drafts={"ngram": DraftFacts(acceptance=1.0)})
    kept = ("scheduling", "engine", "cache", "draft_length")
    return Space(candidate.config, candidate.registry, slo=slo, step_times=times, shares=False, keep=kept), trials


def test_trials_of_draft_lengths_take_the_steps_that_are_left() -> None:
    _, trials = drafting()
    steps = {1: 7 * 0.02, 3: 4 * 0.02, 4: 4 * 0.02 + 2 * 0.1}
    for most, seconds in steps.items():
        trial = trials.run({"speculation.ngram.max_draft_tokens": most}, "short", 0.1)
        assert trial is not None
        assert trial.e2e_mean_s == pytest.approx(seconds)


@pytest.mark.nightly
def test_as_many_drafts_as_cost_nothing_are_found() -> None:
    space, trials = drafting()
    found = search(space, trials, Parts(rungs=("short",), held_out="other"), hint=1.0, budget=30)
    assert found.best.changes == {"speculation.ngram.max_draft_tokens": 3}
    assert found.best.rate > 1.5 * found.start.rate > 0
