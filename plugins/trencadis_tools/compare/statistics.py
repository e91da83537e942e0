"""Intervals of paired differences: blocks of requests, independent runs, and a confidence sequence valid after every pair.

The method depends on the unit of replication. Requests of one run pass through a shared queue, so that their differences
are correlated: they are resampled in blocks. Runs of different seeds are independent: Student's t. A comparison that goes on until it
is decided looks at its data again and again: a confidence sequence holds at all times together, an interval does not.

Source: measured coverage of each method is in docs/decisions/0085.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.records import FloatArray, Int64Array

__all__ = [
    "ALPHA",
    "FIRST_LOOK",
    "MIN_REQUESTS",
    "Interval",
    "SequencePoint",
    "block_interval",
    "block_length",
    "confidence_sequence",
    "holm",
    "run_interval",
]

ALPHA = 0.05
"""Error rate of every interval."""

FIRST_LOOK = 20
"""Pairs before the first look at the asymptotic confidence sequence: starting at 10 it errs in 7.4 % of comparisons, at 20 in 4.1 %."""

MIN_REQUESTS = 1000
"""Requests of one run that the block rule needs: blocks of at least 50, and at least 20 of them."""

_TIGHTEST = 50
"""Number of pairs at which the confidence sequence is tightest."""
_SHORTEST_BLOCK, _FEWEST_BLOCKS = 50, 20
_DECORRELATED = 0.1
_NUM_RESAMPLES = 2000
_CHUNK = 4_000_000
"""Number of values resampled at once (32 MB)."""


@attrs.frozen(kw_only=True)
class Interval:
    """A difference and its 95 % confidence interval.

    Attributes:
        difference: Other minus baseline, in the unit of the metric.
        low: Lower end.
        high: Upper end; both ends are infinite if there are too few pairs.
        p_value: Two-sided p value of no difference.
        num_units: Number of pairs of runs or of requests.
        method: ``blocks of 50 requests``, ``runs`` or ``sequence of runs``.
        is_reliable: False: the condition of the method was not met, and the interval is too narrow.
    """

    difference: float
    low: float
    high: float
    p_value: float
    num_units: int
    method: str
    is_reliable: bool = True


def block_length(differences: FloatArray) -> tuple[int, bool]:
    """Return the number of consecutive requests that are resampled together, and whether the rule was met. Pure.

    Five times the decorrelation length (the first lag with an autocorrelation below 0.1), at least 50, at most a twentieth of all.

    Args:
        differences: Differences of requests in order of arrival, ``[num_requests]``, at least ``MIN_REQUESTS``.

    Raises:
        ValueError: There are fewer.
    """
    num = len(differences)
    if num < MIN_REQUESTS:
        raise ValueError(f"{num} requests: the block rule needs {MIN_REQUESTS}.")
    longest = num // _FEWEST_BLOCKS
    centred = differences - differences.mean()
    variance = float(centred @ centred)
    lag = 1
    while 5 * lag <= longest and variance and float(centred[:-lag] @ centred[lag:]) >= _DECORRELATED * variance:
        lag += 1
    return min(max(_SHORTEST_BLOCK, 5 * lag), longest), 5 * lag <= longest


def block_interval(
    baseline: FloatArray, other: FloatArray, *, quantile: float | None = None, num_looks: int = 1, seed: int = 0
) -> Interval:
    """Return the interval of a difference of means, or of quantiles, by the circular block bootstrap of pairs. Pure.

    Blocks of pairs are drawn with replacement from all positions, with the first request following the last, so that both values of a
    request stay together and every request is drawn equally often. The ends of the 95 % interval are percentiles of the resampled
    differences, moved away from the difference by the factor Student's quantile / normal quantile times sqrt(k / (k - 1)) for k blocks,
    since few blocks underestimate the variance.

    Args:
        baseline: Values of requests in order of arrival, ``[num_requests]``.
        other: Values of the same requests under the other configuration, ``[num_requests]``.
        quantile: Quantile of each side (not of the differences), 0 to 1; None: the mean.
        num_looks: Maximum number of intervals that are looked at as requests arrive: each has level 1 - 0.05 / ``num_looks``, so
            that together they hold with 95 % (Bonferroni).
        seed: Seed of the resampling.

    Raises:
        ValueError: Fewer than ``MIN_REQUESTS`` requests.
        ConfigError: scipy is missing.

    Source: Politis and Romano 1992, A circular block-resampling procedure for stationary data.
    """
    from trencadis_tools.lab import scipy_stats

    length, is_reliable = block_length(other - baseline)
    rng = np.random.default_rng(seed)
    num = len(baseline)
    starts: Int64Array = rng.integers(num, size=(_NUM_RESAMPLES, math.ceil(num / length)))
    if quantile is None:
        difference = float(np.mean(other) - np.mean(baseline))
        resampled = _resampled_means(other - baseline, starts, length)
    else:
        difference = float(np.quantile(other, quantile) - np.quantile(baseline, quantile))
        resampled = _resampled_quantiles(baseline, other, starts, length, quantile)
    num_blocks, stats, alpha = num / length, scipy_stats(), ALPHA / num_looks
    wider = stats.t(num_blocks - 1).ppf(1 - alpha / 2) / stats.norm.ppf(1 - alpha / 2)
    resampled = difference + wider * math.sqrt(num_blocks / (num_blocks - 1)) * (resampled - difference)
    low, high = np.quantile(resampled, [alpha / 2, 1 - alpha / 2]).tolist()
    tail = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    return Interval(
        difference=difference,
        low=low,
        high=high,
        p_value=min(1.0, num_looks * 2 * (tail + 1) / (_NUM_RESAMPLES + 1)),
        num_units=num,
        method=f"blocks of {length} requests" + (f", {num_looks} looks" if num_looks > 1 else ""),
        is_reliable=is_reliable,
    )


def _resampled_means(differences: FloatArray, starts: Int64Array, length: int) -> FloatArray:
    """Return the mean of each row of blocks; the last block is cut so that a row has as many values as ``differences``. Pure."""
    num = len(differences)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([differences, differences[: length - 1]]))])
    last = num - (starts.shape[1] - 1) * length
    whole, cut = starts[:, :-1], starts[:, -1]
    total = (sums[whole + length] - sums[whole]).sum(axis=1) + sums[cut + last] - sums[cut]
    means: FloatArray = total / num
    return means


def _resampled_quantiles(
    baseline: FloatArray, other: FloatArray, starts: Int64Array, length: int, quantile: float
) -> FloatArray:
    num = len(baseline)
    rows = max(1, _CHUNK // num)
    found = []
    for first in range(0, len(starts), rows):
        places = (starts[first : first + rows, :, None] + np.arange(length)).reshape(-1, starts.shape[1] * length)
        places = places[:, :num] % num
        found.append(np.quantile(other[places], quantile, axis=1) - np.quantile(baseline[places], quantile, axis=1))
    return np.concatenate(found)


def run_interval(differences: FloatArray) -> Interval:
    """Return Student's interval of the mean difference of independent runs; infinite for fewer than two. Pure.

    Args:
        differences: Differences of runs with equal seeds, ``[num_runs]``.

    Raises:
        ConfigError: scipy is missing.
    """
    from trencadis_tools.lab import scipy_stats

    num = len(differences)
    mean = float(np.mean(differences))
    error = float(np.std(differences, ddof=1)) / math.sqrt(num) if num > 1 else math.inf
    if error == 0:  # all runs differ equally; in a simulation that is exact, for example when nothing changed
        return Interval(difference=mean, low=mean, high=mean, p_value=float(mean == 0), num_units=num, method="runs")
    student = scipy_stats().t(num - 1) if num > 1 else None
    reach = error * float(student.ppf(1 - ALPHA / 2)) if student else math.inf
    p_value = 2 * float(student.sf(abs(mean) / error)) if student else 1.0
    return Interval(difference=mean, low=mean - reach, high=mean + reach, p_value=p_value, num_units=num, method="runs")


@attrs.frozen(kw_only=True)
class SequencePoint:
    """The confidence sequence after some pairs.

    Attributes:
        num_pairs: Number of pairs so far.
        difference: Mean difference of these pairs.
        low: Lower end; minus infinity before the first look.
        high: Upper end.
        p_value: p value valid at any time: without a difference, the probability that it ever falls below p is at most p.
    """

    num_pairs: int
    difference: float
    low: float
    high: float
    p_value: float


def confidence_sequence(differences: Sequence[float] | FloatArray) -> list[SequencePoint]:
    """Return the asymptotic confidence sequence of the mean difference after each pair. Pure.

    All intervals together contain the true mean with a probability of 95 %, so that one may stop as soon as one of them decides.

    Args:
        differences: Differences of independent pairs in the order of the runs, ``[num_pairs]``.

    Source: Waudby-Smith et al. 2021, arXiv 2103.06476, theorem 2.2; the p value solves its bound for the error rate.
    """
    values = np.asarray(differences, np.float64)
    counts = np.arange(1, len(values) + 1)
    means = np.cumsum(values) / counts
    variances = np.maximum(0.0, np.cumsum((values - values[:1]) ** 2) / counts - (means - values[:1]) ** 2)
    wanted = -2 * math.log(ALPHA)
    rho2 = (wanted + math.log(wanted + 1)) / _TIGHTEST
    scale = counts * rho2 + 1
    reach = np.sqrt(variances * 2 * scale / (counts**2 * rho2) * np.log(np.sqrt(scale) / ALPHA))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.where(means == 0, 0.0, means**2 * counts**2 * rho2 / (variances * 2 * scale))
    p_values = np.minimum(1.0, np.sqrt(scale) * np.exp(-exponents))
    is_early = counts < FIRST_LOOK
    reach, p_values = np.where(is_early, math.inf, reach), np.minimum.accumulate(np.where(is_early, 1.0, p_values))
    columns = (counts, means, means - reach, means + reach, p_values)
    return [
        SequencePoint(num_pairs=number, difference=mean, low=low, high=high, p_value=p_value)
        for number, mean, low, high, p_value in zip(*(column.tolist() for column in columns), strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p values: rejecting those up to 5 % rejects any true hypothesis with a probability of at most 5 %. Pure.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
