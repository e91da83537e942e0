from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.draft_length.time_curve import TimeCurve


def at(curve, *sizes):
    return curve.at(np.array(sizes, np.int64)).tolist()


def warm(base):
    """Return a curve behind its first measurement."""
    curve = TimeCurve(base=base)
    curve.add(4, 77.0)
    return curve


def test_the_first_measurement_is_left_out():
    assert not warm(32).is_known


def test_a_curve_that_measured_nothing_is_a_line():
    curve = TimeCurve(base=32)
    assert not curve.is_known
    assert at(curve, 0, 32) == [32, 64]


def test_times_are_in_proportion_beside_the_only_size_measured():
    curve = warm(32)
    curve.add(32, 0.01)
    assert curve.is_known
    assert at(curve, 0, 16, 32, 64) == pytest.approx([0.005, 0.0075, 0.01, 0.015])


def test_times_are_on_the_line_between_two_sizes_and_beyond_them():
    curve = warm(0)
    curve.add(8, 0.010)
    curve.add(24, 0.014)
    assert at(curve, 8, 16, 24, 32, 48) == pytest.approx([0.010, 0.012, 0.014, 0.016, 0.020])


def test_a_size_measured_once_is_soon_forgotten():
    """Its one step may have been slow, and who avoids it for that would never know."""
    curve = warm(0)
    curve.add(24, 9.0)
    for _ in range(350):
        curve.add(8, 0.01)
    assert at(curve, 24) == pytest.approx([0.03])


def test_growth_is_never_below_none():
    curve = warm(32)
    curve.add(8, 0.02)
    curve.add(24, 0.01)
    assert at(curve, 8, 24, 48) == pytest.approx([0.01, 0.01, 0.01])


def test_slow_steps_say_nothing():
    """Three of four, and one that was too short by chance among sixteen."""
    curve = warm(32)
    for _ in range(4):
        for seconds in (5.0, 0.010, 7.0, 9.0):
            curve.add(4, seconds)
    assert at(curve, 4) == pytest.approx([0.010])
    curve.add(4, 0.001)
    assert at(curve, 4) == pytest.approx([0.010])


def test_a_size_measured_once_says_nothing_beside_one_measured_twice():
    curve = warm(0)
    for size, seconds in ((8, 0.01), (16, 9.0), (8, 0.01)):
        curve.add(size, seconds)
    assert at(curve, 16) == pytest.approx([0.02])


def test_the_first_of_two_steps_may_be_slow():
    curve = warm(32)
    curve.add(4, 5.0)
    curve.add(4, 0.01)
    assert at(curve, 4) == pytest.approx([0.01])


def test_times_follow_a_change():
    curve = warm(32)
    for _ in range(10):
        curve.add(4, 0.01)
    for _ in range(15):
        curve.add(4, 0.03)
    assert at(curve, 4) == pytest.approx([0.03])


def test_a_size_that_is_no_longer_seen_is_forgotten():
    curve = warm(0)
    curve.add(8, 1.0)
    curve.add(8, 1.0)
    for _ in range(300):
        curve.add(4, 0.01)
    assert at(curve, 8) == pytest.approx([1.0])
    for _ in range(400):
        curve.add(4, 0.01)
    assert at(curve, 8) == pytest.approx([0.02])


def test_large_sizes_are_kept_within_a_thirty_second():
    curve = warm(0)
    for size in range(65, 5000):
        curve.add(size, size * 1e-5)
    assert len(curve._sizes) < 150
    sizes = np.arange(70, 4900)
    assert np.abs(curve.at(sizes) / (sizes * 1e-5) - 1).max() < 1 / 31


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (-1, 1.0), (4, 0.0), (4, -1.0), (4, float("nan"))])
def test_what_is_no_measurement_is_ignored(size, seconds):
    curve = warm(32)
    curve.add(size, seconds)
    assert not curve.is_known


def test_larger_step_is_never_taken_for_quicker() -> None:
    """The machine was slow while steps of one token ran: they take no longer than those of two."""
    curve = TimeCurve(base=32.0)
    for size, seconds in ((1, 1.0), (1, 1.2), (1, 1.2), (2, 0.8), (2, 0.8), (4, 1.5), (4, 1.5)):
        curve.add(size, seconds)
    one, two, four = curve.at(np.array([1, 2, 4])).tolist()
    assert one == two == pytest.approx(0.8)
    assert four == pytest.approx(1.5)
