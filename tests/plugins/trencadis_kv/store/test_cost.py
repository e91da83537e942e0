from __future__ import annotations

import math

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis_kv.store.cost import CostModel, MovingLine


def line_through(*points):
    line = MovingLine()
    for x, y in points:
        line.add(x, y)
    return line


def test_nothing_is_known_before_the_first_point():
    assert math.isnan(MovingLine().at(3.0))


def test_points_on_a_line_are_found_again():
    line = line_through(*[(x, 0.5 + 0.25 * x) for x in (1.0, 5.0, 9.0, 2.0)])
    assert [line.at(x) for x in (0.0, 4.0, 100.0)] == pytest.approx([0.5, 1.5, 25.5])


def test_one_size_alone_is_read_as_time_per_byte():
    assert line_through((4.0, 2.0), (4.0, 2.0)).at(10.0) == pytest.approx(5.0)


def test_no_prediction_is_below_zero():
    falling, low = line_through((1.0, 9.0), (9.0, 1.0)), line_through((5.0, 1.0), (6.0, 3.0))
    assert all(line.at(x) >= 0.0 for line in (falling, low) for x in (0.0, 1.0, 5.0, 1e9))


def test_line_is_the_weighted_least_squares_fit():
    noise = np.random.default_rng(0)
    x = noise.uniform(1.0, 100.0, 30)
    y = 3.0 + 2.0 * x + noise.normal(0.0, 0.5, 30)
    weights = 0.95 ** np.arange(29, -1, -1)
    slope, latency = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assert line_through(*zip(x.tolist(), y.tolist(), strict=True)).at(50.0) == pytest.approx(latency + 50.0 * slope)


def test_what_was_measured_of_late_weighs_more():
    line = line_through(*[(1.0, 1.0)] * 100, *[(1.0, 3.0)] * 100)
    assert 2.9 < line.at(1.0) < 3.0


def test_load_pays_the_latency_of_every_call():
    cost = CostModel()
    for num_bytes in (100, 400):
        cost.loaded(num_bytes=num_bytes, seconds=1.0 + 0.01 * num_bytes)
    assert cost.load_s(1000, call_bytes=400) == pytest.approx(3 * 1.0 + 10.0)
    assert cost.load_s(800, call_bytes=400) == pytest.approx(2 * 1.0 + 8.0)
    assert cost.load_s(50, call_bytes=400) == pytest.approx(1.5)


def test_nothing_measured_is_predicted_as_nan():
    assert math.isnan(CostModel().load_s(1000, call_bytes=400))
    assert math.isnan(CostModel().compute_s(1000))


def test_only_large_steps_say_what_a_token_of_a_prompt_takes():
    cost = CostModel()
    cost.computed(num_tokens=8, seconds=100.0)
    cost.computed(num_tokens=500, seconds=0.0)
    assert math.isnan(cost.compute_s(10))
    cost.computed(num_tokens=500, seconds=1.0)
    cost.computed(num_tokens=8, seconds=100.0)
    assert cost.compute_s(1000) == pytest.approx(2.0)


def test_a_store_that_was_slow_is_given_another_chance():
    clock = SimulatedClock()
    cost = CostModel(clock, max_age_s=60.0)
    cost.loaded(num_bytes=100, seconds=5.0)
    clock.advance(59.0)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(5.0)
    clock.advance(2.0)
    assert math.isnan(cost.load_s(100, call_bytes=400))
    cost.loaded(num_bytes=100, seconds=0.1)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(0.1)


def test_a_load_that_was_given_up_would_have_taken_twice_as_long_whatever_others_took_before():
    clock = SimulatedClock()
    cost = CostModel(clock, retry_s=5.0)
    for _ in range(20):
        cost.loaded(num_bytes=100, seconds=0.1)
    cost.gave_up(num_bytes=100, seconds=2.0)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(4.0)
    clock.advance(4.9)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(4.0)
    clock.advance(0.2)
    assert math.isnan(cost.load_s(100, call_bytes=400)), "it is tried again"
    cost.loaded(num_bytes=100, seconds=0.1)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(0.1)


def test_a_load_that_nobody_wanted_any_more_says_nothing():
    cost = CostModel(SimulatedClock())
    cost.loaded(num_bytes=100, seconds=1.0)
    cost.gave_up(num_bytes=100, seconds=0.01)
    assert cost.load_s(100, call_bytes=400) == pytest.approx(1.0)
