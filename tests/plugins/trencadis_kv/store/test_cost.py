from __future__ import annotations

import math
import time

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis_kv.store.cost import CostModel, MovingLine
from trencadis_kv.store.pace import Pace


def line_through(*points):
    line = MovingLine()
    for x, y in points:
        line.add(x, y)
    return line


def test_line_is_the_weighted_least_squares_fit_and_one_size_alone_is_time_per_byte():
    noise = np.random.default_rng(0)
    x = noise.uniform(1.0, 100.0, 30)
    y = 3.0 + 2.0 * x + noise.normal(0.0, 0.5, 30)
    weights = 0.95 ** np.arange(29, -1, -1)
    slope, latency = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assert line_through(*zip(x.tolist(), y.tolist(), strict=True)).at(50.0) == pytest.approx(latency + 50.0 * slope)
    assert line_through((4.0, 2.0), (4.0, 2.0)).at(10.0) == pytest.approx(5.0)


def test_no_prediction_is_below_zero():
    falling, low = line_through((1.0, 9.0), (9.0, 1.0)), line_through((5.0, 1.0), (6.0, 3.0))
    assert all(line.at(x) >= 0.0 for line in (falling, low) for x in (0.0, 1.0, 5.0, 1e9))


def test_load_pays_the_latency_of_every_call():
    cost = CostModel()
    assert math.isnan(cost.load_s(1000, call_bytes=400))
    for num_bytes in (100, 400):
        cost.loaded(num_bytes=num_bytes, seconds=1.0 + 0.01 * num_bytes)
    assert [cost.load_s(size, call_bytes=400) for size in (1000, 800, 50)] == pytest.approx([13.0, 10.0, 1.5])


def test_only_large_steps_say_what_a_token_of_a_prompt_takes():
    cost = CostModel()
    cost.computed(num_tokens=8, seconds=100.0)
    cost.computed(num_tokens=500, seconds=0.0)
    assert math.isnan(cost.compute_s(10))
    cost.computed(num_tokens=500, seconds=1.0)
    cost.computed(num_tokens=8, seconds=100.0)
    assert cost.compute_s(1000) == pytest.approx(2.0)


def load_s(cost):
    return cost.load_s(100, call_bytes=400)


def test_a_store_that_was_slow_is_given_another_chance():
    clock = SimulatedClock()
    cost = CostModel(clock, max_age_s=60.0)
    cost.loaded(num_bytes=100, seconds=5.0)
    clock.advance(59.0)
    assert load_s(cost) == pytest.approx(5.0)
    clock.advance(2.0)
    assert math.isnan(load_s(cost))
    cost.loaded(num_bytes=100, seconds=0.1)
    assert load_s(cost) == pytest.approx(0.1)


def test_a_load_that_was_given_up_would_have_taken_twice_as_long_unless_nobody_wanted_it_any_more():
    clock = SimulatedClock()
    cost = CostModel(clock, retry_s=5.0)
    for _ in range(20):
        cost.loaded(num_bytes=100, seconds=0.1)
    cost.gave_up(num_bytes=100, seconds=0.01)
    assert load_s(cost) == pytest.approx(0.1)
    cost.gave_up(num_bytes=100, seconds=2.0)
    clock.advance(4.9)
    assert load_s(cost) == pytest.approx(4.0)
    clock.advance(0.2)
    assert math.isnan(load_s(cost)), "it is tried again"
    cost.loaded(num_bytes=100, seconds=0.1)
    assert load_s(cost) == pytest.approx(0.1)


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


def test_time_in_which_a_load_waits_is_no_work():
    rests, _ = House().load(wait_s=0.02)
    assert rests[:4] == pytest.approx([0.006] * 4)


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


@pytest.mark.parametrize("limit", [{"num_tokens": 100}, {"give_up_s": 0.1}], ids=str)
def test_load_rests_no_longer_than_three_quarters_of_computing_or_of_its_time_allow(limit):
    rests, seconds = House().load(pieces=10, work_s=0.003, **limit)
    assert 0.07 < seconds <= 0.0751  # 30 ms of work; four times as long would be 120
    assert min(rests[:-1]) > 0.001  # spread over the load, not spent at its beginning


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


@pytest.mark.parametrize(("runs", "num_others", "rest_s"), [(True, 1, 0.014), (False, 2, 0.002)])
def test_loads_that_run_side_by_side_have_one_share_and_those_that_wait_shorten_their_rests(runs, num_others, rest_s):
    house = House()
    others = [house.pace.load(1000, wait_s=10.0) for _ in range(num_others)]
    for other in others:
        if runs:
            other.begin()
    assert house.load()[0][:4] == pytest.approx([rest_s] * 4)
    for other in others:
        other.end()
        other.end()  # once more is harmless
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
