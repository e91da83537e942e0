"""Arrival processes against their closed formulas; numbers are drawn by key, so errors of four standard errors never vary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.errors import ConfigValueError
from trencadis_tools.workloads.arrivals import Arrivals, arrival_times, stretch

NUM = 20_000


@given(
    pattern=st.sampled_from(["constant", "diurnal", "ramp", "bursts"]),
    cv=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    rate=st.floats(0.01, 1000),
    num=st.integers(1, 300),
    seed=st.integers(0, 3),
)
def test_times_ascend_from_zero_and_more_requests_change_none_of_the_first(pattern, cv, rate, num, seed) -> None:
    arrivals = Arrivals(pattern=pattern, cv=cv, rate=rate, end_rate=2 * rate, amplitude=1.0)
    times = arrival_times(arrivals, seed, num)
    assert len(times) == num
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert np.array_equal(arrival_times(arrivals, seed, num + 7)[:num], times)


@given(rate=st.floats(0.1, 100), factor=st.floats(0.1, 10), cv=st.sampled_from([0.0, 1.0, 3.0]))
def test_another_rate_scales_times_and_draws_none_anew(rate, factor, cv) -> None:
    times = arrival_times(Arrivals(rate=rate, cv=cv), 0, 50)
    assert arrival_times(Arrivals(rate=rate * factor, cv=cv), 0, 50) * factor == pytest.approx(times, rel=1e-12)


@pytest.mark.parametrize("pattern", ["diurnal", "ramp", "bursts"])
def test_a_higher_rate_brings_every_request_earlier(pattern: str) -> None:
    def times(rate: float) -> np.ndarray:
        return arrival_times(Arrivals(rate=rate, end_rate=3 * rate, pattern=pattern, period_s=200.0), 0, 2000)

    assert (times(3.0) < times(2.0)).all()


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(arrival_times(Arrivals(rate=5.0, cv=cv), 0, NUM))
    assert abs(gaps.mean() - 0.2) < 4 * 0.2 * cv / math.sqrt(NUM)
    squares = (gaps - 0.2) ** 2
    assert abs(squares.mean() - (0.2 * cv) ** 2) < 4 * squares.std() / math.sqrt(NUM)


def test_counts_of_a_poisson_process_vary_by_their_mean() -> None:
    """The index of dispersion is 1, with a standard error of ``sqrt(2 / n)`` for n windows."""
    times = arrival_times(Arrivals(rate=10.0), 0, NUM)
    counts = np.bincount((times / 2.0).astype(int))[:-1]
    assert abs(counts.var() / counts.mean() - 1) < 4 * math.sqrt(2 / len(counts))


def test_a_diurnal_load_has_in_each_part_of_its_period_the_integral_of_its_rate() -> None:
    arrivals = Arrivals(rate=20.0, pattern="diurnal", amplitude=0.8, period_s=100.0)
    times = arrival_times(arrivals, 0, NUM)
    num_periods = int(times[-1] // 100)
    phases = times[times < num_periods * 100] % 100
    for number in range(10):
        first, last = 10.0 * number, 10.0 * (number + 1)
        swing = 0.8 * 100 / (2 * math.pi)
        expected = 20 * (10 - swing * (math.sin(2 * math.pi * last / 100) - math.sin(2 * math.pi * first / 100)))
        expected *= num_periods
        found = ((phases >= first) & (phases < last)).sum()
        assert abs(found - expected) < 4 * math.sqrt(expected)


def test_evenly_spaced_requests_of_a_ramp_come_where_the_integral_says() -> None:
    """From 1 to 3 a second in 10 s: ``t + t**2 / 10`` requests by t, 20 by its end, and 3 a second after it."""
    times = arrival_times(Arrivals(rate=1.0, end_rate=3.0, ramp_s=10.0, pattern="ramp", cv=0.0), 0, 26)
    assert times[:20] + times[:20] ** 2 / 10 == pytest.approx(np.arange(1, 21))
    assert times[19:] == pytest.approx(10 + np.arange(7) / 3)


def test_bursts_have_their_share_of_requests_and_the_mean_rate() -> None:
    """Of 1 s in 10 with ten times the rate: 10 / (9 + 10) of requests, in many short bursts."""
    arrivals = Arrivals(rate=50.0, pattern="bursts", burst_ratio=10.0, burst_s=0.1, calm_s=0.9, cv=0.0)
    times = arrival_times(arrivals, 0, NUM)
    num_cycles = times[-1]
    # A cycle has requests of an exponential burst and an exponential calm: their variation, by many cycles.
    assert abs(NUM / times[-1] / 50 - 1) < 4 * math.sqrt(0.5 / num_cycles)
    gaps = np.diff(times)
    calm_rate = 50 / 1.9
    in_bursts = (gaps < 2 / (10 * calm_rate)).mean()
    assert in_bursts == pytest.approx(10 / 19, abs=0.05)


def test_recorded_times_are_stretched_to_the_mean_rate() -> None:
    assert stretch([1.0, 2.0, 5.0], 2.0) * (5 - 1) == 1.0, "three requests, two gaps, two a second"
    assert stretch([1.0, 2.0, 5.0], 0.0) == 1.0
    assert stretch([3.0], 2.0) == 1.0
    assert stretch([0.0, 1.0, 4.0], math.inf) == 0, "all at once"
    assert arrival_times(Arrivals(rate=math.inf), 0, 3).tolist() == [0, 0, 0]


def test_times_without_a_rate_are_refused() -> None:
    with pytest.raises(ConfigValueError, match="times that are drawn need a rate"):
        arrival_times(Arrivals(), 0, 3)
    with pytest.raises(ConfigValueError, match="a ramp ends with a rate"):
        arrival_times(Arrivals(rate=1.0, pattern="ramp"), 0, 3)
