from __future__ import annotations

import itertools

import numpy as np
import pytest

from trencadis_gallery.config import MultiLevelConfig
from trencadis_gallery.scheduling.multi_level import MultiLevel
from trencadis_testing.scheduling import SchedulingConformance


class TestMultiLevel(SchedulingConformance):
    counts_tokens = True

    def make(self):
        return MultiLevel(MultiLevelConfig(quantum_tokens=8, starve_s=1.0))


class TestMultiLevelThatPreempts(SchedulingConformance):
    counts_tokens = True
    num_histories = 8

    def make(self):
        return MultiLevel(MultiLevelConfig(quantum_tokens=8, starve_s=1.0, preempt=True))


class TestMultiLevelByTime(SchedulingConformance):
    counts_tokens = True
    num_histories = 2
    num_rules = 25

    def make(self):
        return MultiLevel(MultiLevelConfig(quantum_ms=20.0, starve_s=1.0, preempt=True))


CANDIDATES = np.array([0, 1], np.int32)


@pytest.fixture
def policy():
    return MultiLevel(MultiLevelConfig(quantum_tokens=100, num_levels=5, output_weight=1, preempt=True))


def level_by_definition(prompt: int, output: int) -> int:
    """Join the first level whose quantum holds the prompt; sink when the output has used the level's quantum up."""
    level = 0
    while 100 * 2**level < prompt and level < 40:
        level += 1
    while output >= 100 * 2**level:
        output -= 100 * 2**level
        level += 1
    return min(level, 4)


def test_levels_are_those_of_the_definition(view_of, policy):
    for prompt, output in itertools.product([1, 100, 101, 200, 201, 799, 5000], [0, 99, 100, 299, 300, 700, 9999]):
        view = view_of(num_prompt_tokens={0: prompt}, num_tokens={0: prompt + output})
        assert policy.levels(view, CANDIDATES[:1]).tolist() == [level_by_definition(prompt, output)]


def test_higher_levels_go_first_and_within_one_the_first_to_come(view_of, policy):
    view = view_of(
        waiting=[0, 1, 2, 3],
        num_prompt_tokens={0: 700, 1: 50, 2: 50, 3: 150},
        num_tokens={0: 700, 1: 50, 2: 90, 3: 150},
        arrival_s={0: 0, 1: 3, 2: 2, 3: 1},
        now_s=5.0,
    )
    assert policy.order(view).tolist() == [2, 1, 3, 0]


def test_who_waits_too_long_since_it_last_ran_is_on_the_first_level_again(view_of, request_of, policy):
    columns = {"num_prompt_tokens": {0: 700}, "num_tokens": {0: 700}, "arrival_s": {0: 0.0, 1: 29.0}}
    policy.on_added(slot=0, request=request_of())
    assert policy.order(view_of(waiting=[1, 0], now_s=19.0, **columns)).tolist() == [1, 0]
    assert policy.order(view_of(waiting=[1, 0], now_s=30.0, **columns)).tolist() == [0, 1]
    policy.split(view_of(running=[0], now_s=25.0, **columns), token_budget=64)
    assert policy.order(view_of(waiting=[1, 0], now_s=30.0, **columns)).tolist() == [1, 0]
    policy.on_added(slot=0, request=request_of())
    assert policy.order(view_of(waiting=[1, 0], now_s=30.0, **columns)).tolist() == [0, 1]


def test_lowest_level_gives_way_to_a_higher_one_only(view_of, policy):
    lengths = {0: 50, 1: 700, 2: 150, 3: 3000}
    view = view_of(waiting=[2, 3], running=[0, 1], num_prompt_tokens=lengths, num_tokens=lengths)
    assert policy.preempt_for(view, slot=2, candidates=CANDIDATES) == 1
    assert policy.preempt_for(view, slot=3, candidates=CANDIDATES) == -1
    assert policy.victim(view, candidates=CANDIDATES) == 1


@pytest.fixture
def timed():
    # A prompt of n tokens takes n milliseconds.
    return MultiLevel(MultiLevelConfig(quantum_ms=100, num_levels=5, step_ms=0, token_us=1000, context_token_us=0))


def step(view_of, policy, now_s, running, prompts):
    policy.split(view_of(now_s=now_s, running=running, num_prompt_tokens=prompts), token_budget=64)


@pytest.mark.parametrize("prompt", [1, 100, 101, 799])
@pytest.mark.parametrize("served_ms", [0, 99, 100, 300, 9999])
def test_levels_by_time_are_those_of_the_definition(view_of, request_of, timed, prompt, served_ms):
    timed.on_added(slot=0, request=request_of())
    prompts = {0: prompt}
    step(view_of, timed, 5.0, [], prompts)
    step(view_of, timed, 5.0 + served_ms / 1e3 + 1e-9, [0], prompts)
    view = view_of(num_prompt_tokens=prompts, num_tokens={0: 10**6})
    assert timed.levels(view, CANDIDATES[:1]).tolist() == [level_by_definition(prompt, served_ms)]


def test_only_steps_that_a_sequence_ran_in_count_and_each_once(view_of, request_of, timed):
    for slot in (0, 1):
        timed.on_added(slot=slot, request=request_of())
    prompts = {0: 50, 1: 50}
    step(view_of, timed, 0.0, [], prompts)
    timed.order(view_of(now_s=0.06, running=[0], waiting=[1], num_prompt_tokens=prompts))
    step(view_of, timed, 0.06, [0], prompts)
    view = view_of(num_prompt_tokens=prompts)
    assert timed.levels(view, CANDIDATES).tolist() == [0, 0]
    step(view_of, timed, 0.12, [0], prompts)
    assert timed.levels(view, CANDIDATES).tolist() == [1, 0]
    timed.on_added(slot=0, request=request_of())
    assert timed.levels(view, CANDIDATES).tolist() == [0, 0]
