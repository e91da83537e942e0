from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.scheduling.config import MultiLevelConfig
from trencadis_plugins.scheduling.multi_level import MultiLevel
from trencadis_testing.scheduling import SchedulingConformance


class TestMultiLevel(SchedulingConformance):
    counts_tokens = True
    num_histories = 8
    num_rules = 25

    def make(self):
        return MultiLevel(MultiLevelConfig(quantum_tokens=8, starve_s=1.0))


class TestMultiLevelThatPreempts(SchedulingConformance):
    counts_tokens = True
    num_histories = 8
    num_rules = 25

    def make(self):
        return MultiLevel(MultiLevelConfig(quantum_tokens=8, starve_s=1.0, preempt=True))


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


@pytest.mark.parametrize("prompt", [1, 100, 101, 200, 201, 799, 5000])
@pytest.mark.parametrize("output", [0, 99, 100, 299, 300, 700, 9999])
def test_levels_are_those_of_the_definition(view_of, policy, prompt, output):
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
    assert policy.give_way(view, slot=2, candidates=CANDIDATES) == 1
    assert policy.give_way(view, slot=3, candidates=CANDIDATES) == -1
    assert policy.victim(view, candidates=CANDIDATES) == 1


def test_giving_way_is_a_choice():
    assert not MultiLevel().preempts
    assert MultiLevel(MultiLevelConfig(preempt=True)).preempts
