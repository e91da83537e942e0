from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from trencadis_tools.compare.statistics import (
    FIRST_LOOK,
    block_interval,
    block_length,
    confidence_sequence,
    holm,
    run_interval,
)


def autoregressive(rng: np.random.Generator, num: int, phi: float) -> np.ndarray:
    """Return an AR(1) series with mean 0 that has forgotten where it began."""
    from scipy.signal import lfilter

    return lfilter([1.0], [1.0, -phi], rng.normal(size=num + 200))[200:]


def coverage(phi: float, *, num: int, repeats: int, quantile: float | None = None) -> float:
    """Return how often the interval holds the true difference, which is 0."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(repeats):
        common, own = autoregressive(rng, num, phi), autoregressive(rng, num, phi)
        interval = block_interval(common, common + own if quantile is None else own, quantile=quantile)
        hits += interval.low <= 0 <= interval.high
    return hits / repeats


def false_positives(*, num_pairs: int, repeats: int) -> float:
    """Return in how many comparisons of equals the sequence ever excludes 0."""
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(repeats):
        wrong += any(point.low > 0 or point.high < 0 for point in confidence_sequence(rng.normal(size=num_pairs)))
    return wrong / repeats


# Of 100 intervals with a true coverage of .90, fewer than 82 hold the truth with a probability of .4 %.
@pytest.mark.representatives(2)
@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_block_intervals_hold_the_true_difference_as_often_as_they_should(phi: float) -> None:
    assert coverage(phi, num=2000, repeats=100) >= 0.82


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("phi", "quantile", "least"), [(0.0, None, 0.94), (0.8, None, 0.94), (0.0, 0.9, 0.93), (0.8, 0.9, 0.93)]
)
def test_coverage_of_block_intervals_in_many_repeats(phi: float, quantile: float | None, least: float) -> None:
    # The standard error of a share of .95 is .007 in 1,000 repeats and .018 in 150.
    repeats, error = (1000, 0.014) if quantile is None else (150, 0.036)
    assert least - error <= coverage(phi, num=2000, repeats=repeats, quantile=quantile) <= 0.97 + error


# 5 % of 300 are 15; more than 27 with a probability of .1 %.
def test_watching_every_pair_errs_in_one_comparison_of_twenty() -> None:
    assert false_positives(num_pairs=300, repeats=300) <= 0.09


@pytest.mark.nightly
def test_false_positives_of_the_sequence_in_1500_runs_of_1000_pairs() -> None:
    # The standard error is .0056.
    assert false_positives(num_pairs=1000, repeats=1500) <= 0.05 + 2 * 0.0056


@pytest.mark.nightly
@pytest.mark.parametrize("phi", [0.0, 0.8, 0.95])
def test_false_positives_of_the_sequence_over_blocks_of_a_trace_that_is_run_twice_as_far_each_time(phi: float) -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(300):
        values = autoregressive(rng, 8000, phi)
        ends = []
        for num in (2000, 4000, 8000):
            length, _ = block_length(values[:num])
            blocks = values[: num // length * length].reshape(-1, length).mean(axis=1)
            ends.append(confidence_sequence(blocks)[-1])
        wrong += any(end.low > 0 or end.high < 0 for end in ends)
    assert wrong / 300 <= 0.05  # measured: .003, .017 and .02


def test_the_sequence_finds_half_a_standard_deviation_in_thirty_pairs_or_so() -> None:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(60):
        points = confidence_sequence(rng.normal(0.5, 1.0, size=300))
        found.append(next(point.num_pairs for point in points if point.low > 0))
    assert 27 <= float(np.median(found)) <= 38


def test_the_sequence_is_the_published_formula() -> None:
    values = np.random.default_rng(1).normal(size=60)
    point = confidence_sequence(values)[59]
    alpha, t = 0.05, 60
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / 50
    radius = math.sqrt(2 * (t * rho2 + 1) / (t**2 * rho2) * math.log(math.sqrt(t * rho2 + 1) / alpha))
    assert (point.difference, point.num_pairs) == (pytest.approx(values.mean()), 60)
    assert point.high - point.difference == pytest.approx(values.std() * radius)
    assert point.difference - point.low == pytest.approx(values.std() * radius)


def test_nothing_is_said_before_the_first_look() -> None:
    points = confidence_sequence([5.0] * FIRST_LOOK)
    assert [point.p_value for point in points[:-1]] == [1.0] * (FIRST_LOOK - 1)
    assert points[-2].low == -math.inf
    assert (points[-1].low, points[-1].high) == (5.0, 5.0)
    assert points[-1].p_value < 1e-9


@given(st.lists(st.floats(-10, 10), min_size=FIRST_LOOK, max_size=60))
def test_p_of_the_sequence_is_small_exactly_when_an_interval_excludes_zero(values: list[float]) -> None:
    points = confidence_sequence(values)
    excluded = False
    for point in points:
        excluded = excluded or point.low > 1e-9 or point.high < -1e-9
        if excluded:
            assert point.p_value <= 0.05 + 1e-9
        elif not any(-1e-9 <= end <= 1e-9 for end in (point.low, point.high)):
            assert point.p_value >= 0.05 - 1e-9 or point.p_value == points[point.num_pairs - 2].p_value


def test_the_interval_of_runs_is_that_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(2)
    one, two = rng.normal(size=12), rng.normal(0.4, 1.3, size=12)
    expected = stats.ttest_rel(two, one)
    interval = run_interval(two - one)
    low, high = expected.confidence_interval(0.95)
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))
    assert interval.p_value == pytest.approx(expected.pvalue)


def test_one_run_has_no_interval_and_equal_runs_have_a_point() -> None:
    alone = run_interval(np.array([3.0]))
    assert (alone.low, alone.high, alone.p_value) == (-math.inf, math.inf, 1.0)
    same = run_interval(np.zeros(5))
    assert (same.low, same.high, same.p_value) == (0.0, 0.0, 1.0)
    assert run_interval(np.full(5, 2.0)).p_value == 0.0


@pytest.mark.parametrize(("num", "period", "expected"), [(1000, 1, 50), (40_000, 1, 50), (4000, 30, 135)])
def test_blocks_are_five_times_as_long_as_differences_are_correlated(num: int, period: int, expected: int) -> None:
    # Values that stay for `period` requests have the autocorrelation 1 - lag / period: below .1 from .9 · period on.
    values = np.random.default_rng(4).normal(size=num // period + 1).repeat(period)[:num]
    length, is_kept = block_length(values)
    assert is_kept
    assert length == pytest.approx(expected, rel=0.15)


def test_a_trend_is_correlated_over_more_than_any_block() -> None:
    assert block_length(np.arange(2000.0)) == (100, False)
    assert not block_interval(np.zeros(2000), np.arange(2000.0)).is_reliable


def test_fewer_requests_than_the_rule_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="999 requests: the block rule needs 1000"):
        block_length(np.zeros(999))


def test_pairs_stay_together_so_that_a_common_load_cancels() -> None:
    load = np.random.default_rng(6).gamma(2.0, 10.0, size=2000)
    mean = block_interval(load, load + 1.0)
    assert (mean.low, mean.high) == (pytest.approx(1.0), pytest.approx(1.0))
    p99 = block_interval(load, load + 1.0, quantile=0.99)
    assert (p99.low, p99.high) == (pytest.approx(1.0), pytest.approx(1.0))


def test_the_quantile_is_that_of_each_side_not_of_the_differences() -> None:
    rng = np.random.default_rng(8)
    values = rng.normal(size=4000)
    shuffled = rng.permutation(
        values
    )  # the same distribution: differences of requests are large, that of quantiles is 0
    interval = block_interval(values, shuffled, quantile=0.9)
    assert interval.difference == 0.0
    assert interval.low < 0 < interval.high
    assert np.quantile(shuffled - values, 0.9) > 1.5


def test_of_several_looks_each_interval_is_wider_so_that_all_hold_together() -> None:
    rng = np.random.default_rng(3)
    baseline = rng.exponential(size=1500)
    other = baseline + rng.normal(0.02, 0.3, 1500)
    once, often = (block_interval(baseline, other, quantile=0.9, num_looks=looks) for looks in (1, 4))
    assert often.low < once.low < once.difference < once.high < often.high
    assert often.p_value == pytest.approx(min(1, 4 * once.p_value))
    assert often.method == f"{once.method}, 4 looks"


def test_the_cut_last_block_is_counted_as_it_is() -> None:
    values = np.random.default_rng(9).normal(size=1033)  # 20 blocks of 50 and one of 33
    interval = block_interval(np.zeros(1033), values)
    starts = np.random.default_rng(0).integers(1033, size=(2000, 21))
    round_again = np.concatenate([values, values])
    slow = np.array(
        [np.concatenate([round_again[start : start + 50] for start in row])[:1033].mean() for row in starts]
    )
    num_blocks = 1033 / 50
    student, normal = stats.t(num_blocks - 1).ppf(0.975), stats.norm.ppf(0.975)
    wider = student / normal * math.sqrt(num_blocks / (num_blocks - 1))
    ends = values.mean() + wider * (np.quantile(slow, [0.025, 0.975]) - values.mean())
    assert (interval.low, interval.high) == tuple(pytest.approx(x) for x in ends)


def test_holm_multiplies_the_smallest_by_how_many_there_are() -> None:
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
