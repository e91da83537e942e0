from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.scheduling.config import PriorityConfig
from trencadis_plugins.scheduling.priority import Priority
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.scheduling import SchedulingConformance


class TestPriority(SchedulingConformance):
    make = Priority
    declares = frozenset({"priority_order"})


class TestPriorityThatPreempts(SchedulingConformance):
    declares = frozenset({"priority_order"})
    num_histories = 8

    def make(self):
        return Priority(PriorityConfig(preempt=True, age_s=5.0))


CANDIDATES = np.array([0, 1], np.int32)


def test_smaller_numbers_go_first_and_equal_ones_by_arrival(view_of):
    view = view_of(waiting=[0, 1, 2, 3], priority={0: 5, 1: 0, 2: 5, 3: 0}, arrival_s={0: 1, 1: 4, 2: 0, 3: 3})
    assert Priority(PriorityConfig(age_s=0)).order(view).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(("wait_s", "first"), [(49.0, 1), (51.0, 0)])
def test_waiting_makes_up_for_priority_at_the_stated_rate(view_of, wait_s, first):
    """Five steps of priority at ten seconds each."""
    view = view_of(waiting=[0, 1], priority={0: 5, 1: 0}, arrival_s={0: 0, 1: wait_s}, now_s=wait_s)
    assert Priority(PriorityConfig(age_s=10)).order(view)[0] == first


def test_order_of_two_never_changes_while_they_wait(view_of):
    policy = Priority(PriorityConfig(age_s=7))
    columns = {"priority": {0: 3, 1: 1, 2: 2}, "arrival_s": {0: 0, 1: 11, 2: 6}}
    orders = {
        tuple(policy.order(view_of(waiting=[0, 1, 2], now_s=now_s, **columns)).tolist()) for now_s in range(11, 400)
    }
    assert len(orders) == 1


def test_least_urgent_gives_way_only_to_a_smaller_number(view_of):
    policy = Priority(PriorityConfig(preempt=True, age_s=0))
    view = view_of(waiting=[2, 3], running=[0, 1], priority={0: 5, 1: 9, 2: 1, 3: 9})
    assert policy.preempt_for(view, slot=2, candidates=CANDIDATES) == 1
    assert policy.preempt_for(view, slot=3, candidates=CANDIDATES) == -1


def test_who_waited_long_enough_does_not_give_way_any_more(view_of):
    view = view_of(
        waiting=[2],
        running=[0, 1],
        priority={0: 3, 1: 3, 2: 0},
        arrival_s={2: 100},
        waited_s={0: 100, 1: 100},
        now_s=100,
    )
    assert Priority(PriorityConfig(preempt=True, age_s=30)).preempt_for(view, slot=2, candidates=CANDIDATES) == -1
    assert Priority(PriorityConfig(preempt=True, age_s=40)).preempt_for(view, slot=2, candidates=CANDIDATES) == 1


def test_who_has_run_for_long_gives_way_as_one_that_has_just_begun(view_of):
    view = view_of(waiting=[2], running=[0, 1], priority={0: 3, 1: 3, 2: 0}, arrival_s={2: 10_000}, now_s=10_000)
    assert Priority(PriorityConfig(preempt=True, age_s=30)).preempt_for(view, slot=2, candidates=CANDIDATES) == 1


def test_who_has_run_and_was_preempted_is_as_old_as_it_has_waited(view_of):
    columns = {"priority": {0: 1, 1: 0}, "arrival_s": {0: 0, 1: 1000}, "waiting_since_s": {0: 1000, 1: 1000}}
    policy = Priority(PriorityConfig(age_s=30))
    assert policy.order(view_of(waiting=[0, 1], waited_s={0: 20}, now_s=1000, **columns)).tolist() == [1, 0]
    assert policy.order(view_of(waiting=[0, 1], waited_s={0: 40}, now_s=1000, **columns)).tolist() == [0, 1]


def test_urgent_request_runs_at_once_if_running_ones_give_way_and_waits_for_a_row_otherwise(request_of):
    ends = {}
    for policy in (Priority(PriorityConfig(preempt=True)), Priority()):
        engine = make_engine(policy=policy, max_num_seqs=2, backend=FakeBackend(eos=-1, max_model_len=256))
        for name in ("a", "b"):
            engine.add(request_of(name, 10, max_tokens=40, priority=5))
        for _ in range(4):
            engine.step()
        engine.add(request_of("urgent", 12, max_tokens=4, priority=0))
        ends[policy.preempts] = list(drain(engine).values())
    assert [(one.request_id, one.num_preemptions) for one in ends[True]] == [("urgent", 0), ("a", 0), ("b", 1)]
    assert ends[True][2].token_ids.tolist() == fake_text(range(10), 40, eos=-1)
    assert [one.request_id for one in ends[False]] == ["a", "b", "urgent"]


def test_nobody_is_pushed_out_where_that_would_not_be_enough(request_of):
    """The urgent prompt needs 10 blocks; 12 are there, of which the important one keeps 5."""
    engine = make_engine(
        policy=Priority(PriorityConfig(preempt=True)), num_blocks=12, backend=FakeBackend(eos=-1, max_model_len=48)
    )
    engine.add(request_of("important", 18, max_tokens=2, priority=0))
    engine.add(request_of("unimportant", 10, prompt_token_ids=tuple(range(50, 60)), max_tokens=2, priority=5))
    engine.step()
    engine.add(request_of("urgent", 38, prompt_token_ids=tuple(range(38, 0, -1)), max_tokens=2, priority=1))
    ends = drain(engine)
    assert ends["unimportant"].num_preemptions == 0
    assert len(ends) == 3
