from __future__ import annotations

import time

import pytest

from trencadis.clock import SimulatedClock
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.pace import Pace


class House:
    """An engine whose prefills take 1 ms a token, and whose last step of 10 ms has just ended; a thread's time is what it is told."""

    def __init__(self, share=0.25, *, computed=True, stepped=True, least_s=0.0):
        self.clock, self.cpu_s = SimulatedClock(), 0.0
        cost = CostModel(self.clock)
        if computed:
            cost.computed(num_tokens=1000, seconds=1.0)
        self.pace = Pace(share, cost=cost, clock=self.clock, cpu_s=lambda: self.cpu_s, least_s=least_s)
        if stepped:
            self.pace.stepped(device_s=0.01)

    def load(self, *, num_tokens=1000, pieces=5, work_s=0.002, wait_s=0.0, give_up_s=10.0, steps=True):
        """Return the rests of a load of equal pieces, and its whole duration."""
        since_s, load, rests = self.clock.now_s(), self.pace.load(num_tokens, wait_s=give_up_s), []
        load.begin()
        for piece in range(1, pieces + 1):
            self.clock.advance(work_s + wait_s)
            self.cpu_s += work_s
            if steps:
                self.pace.stepped(device_s=0.01)
            rests.append(load.rest_s(piece / pieces))
            self.clock.advance(rests[-1])
        load.end()
        return rests, self.clock.now_s() - since_s


def test_load_works_its_share_of_the_time_while_steps_go_on():
    rests, _ = House().load()
    assert rests == pytest.approx([0.006] * 4 + [0.0])


def test_short_rests_are_put_together():
    """Behind each one, caches are cold and a processor has to be woken up."""
    rests, _ = House(least_s=0.015).load(pieces=10)
    assert rests == pytest.approx([0.0, 0.0, 0.018] * 3 + [0.0])
    assert House(least_s=1.0).load()[0] == [0.0] * 5


def test_rests_that_are_put_together_do_not_make_a_load_longer_than_it_may_be():
    rests, seconds = House(least_s=0.01).load(num_tokens=100, pieces=10, work_s=0.003)
    assert 0.06 < seconds <= 0.0751
    assert all(rest == 0.0 or rest >= 0.01 for rest in rests)


def test_time_in_which_a_load_waits_is_no_work():
    rests, _ = House().load(wait_s=0.02)
    assert rests[:4] == pytest.approx([0.006] * 4)


def test_load_does_not_rest_while_nobody_computes():
    rests, seconds = House(stepped=False).load(steps=False)
    assert rests == [0.0] * 5
    assert seconds == pytest.approx(0.01)


def test_load_goes_on_at_once_when_the_last_step_is_a_while_ago():
    rests, _ = House().load(pieces=8, work_s=0.004, steps=False)
    assert rests[:2] == pytest.approx([0.012, 0.012])  # 4 ms and 20 ms behind the step's end; 36 ms are too late
    assert rests[2:] == [0.0] * 6


@pytest.mark.parametrize(
    ("share", "stepped", "gives_way"), [(0.25, True, True), (0.25, False, False), (1.0, True, False)]
)
def test_load_gives_way_while_the_engine_computes(share, stepped, gives_way):
    house = House(share, stepped=stepped)
    load = house.pace.load(1000, wait_s=10.0)
    assert load.gives_way == gives_way
    house.clock.advance(60.0)
    assert not load.gives_way


def test_share_of_one_never_rests():
    assert House(1.0).load()[0] == [0.0] * 5


def test_load_rests_no_longer_than_three_quarters_of_what_computing_takes_allow():
    rests, seconds = House().load(num_tokens=100, pieces=10, work_s=0.003)
    assert 0.07 < seconds <= 0.0751  # 30 ms of work; four times as long would be 120
    assert min(rests[:-1]) > 0.001  # spread over the load, not spent at its beginning


def test_load_rests_no_longer_than_three_quarters_of_the_time_after_which_it_is_given_up():
    _, seconds = House().load(pieces=10, work_s=0.003, give_up_s=0.1)
    assert 0.07 < seconds <= 0.0751


def test_load_that_takes_longer_than_that_does_not_rest():
    assert House().load(num_tokens=50, pieces=10, work_s=0.006)[0] == [0.0] * 10


def test_load_rests_for_its_share_alone_where_nobody_knows_what_computing_takes():
    """An engine that only generates never finds out, and is the one whose steps are to be spared."""
    assert House(computed=False).load(pieces=50)[0] == pytest.approx([0.006] * 49 + [0.0])
    assert House(computed=False).load(pieces=10, work_s=0.003, give_up_s=0.1)[1] <= 0.0751


def test_load_does_not_rest_where_steps_need_no_processor():
    house = House()
    house.pace.is_needed = False
    assert house.load()[0] == [0.0] * 5


def test_loads_that_run_side_by_side_have_one_share():
    house = House()
    other = house.pace.load(1000, wait_s=10.0)
    other.begin()
    assert house.load()[0][:4] == pytest.approx([0.014] * 4)
    other.end()
    assert house.load()[0][:4] == pytest.approx([0.006] * 4)


def test_loads_that_wait_shorten_the_rests_of_those_that_run():
    house = House()
    waiting = [house.pace.load(1000, wait_s=10.0) for _ in range(2)]
    assert house.load()[0][:4] == pytest.approx([0.002] * 4)
    for load in waiting:
        load.end()
        load.end()  # once more is harmless
    assert house.load()[0][:4] == pytest.approx([0.006] * 4)


def test_time_that_a_load_waited_for_a_thread_is_not_spent_twice():
    house = House()
    load = house.pace.load(100, wait_s=10.0)
    house.clock.advance(0.075)
    load.begin()
    house.clock.advance(0.002)
    house.cpu_s += 0.002
    house.pace.stepped(device_s=0.01)
    assert load.rest_s(0.5) == 0.0


def test_work_is_the_time_of_the_thread_that_calls():
    clock = SimulatedClock()
    cost = CostModel(clock)
    cost.computed(num_tokens=1000, seconds=1000.0)
    pace = Pace(0.5, cost=cost, clock=clock, least_s=0.0)
    pace.stepped(device_s=1000.0)
    load = pace.load(1000, wait_s=10_000.0)
    load.begin()
    before_s = time.thread_time()
    while time.thread_time() < before_s + 0.03:
        pass
    clock.advance(1.0)
    rest_s, most_s = load.rest_s(0.5), time.thread_time() - before_s
    assert 0.03 <= rest_s <= most_s + 0.001
