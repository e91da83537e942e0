"""Warm-up and saturation: the requests of a run that count, and whether the run reaches a steady state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.records import FloatArray
from trencadis_tools.lab import scipy_stats

__all__ = ["Backlog", "backlog_of", "combined", "mean_in_system", "warm_up_cut"]

_BATCH = 5
_BINS, _BINS_PER_BATCH = 200, 10
_SURE = 0.01
_LEAST_GROWTH = 0.02
_LEAST_P = 1e-12


@attrs.frozen(kw_only=True)
class Backlog:
    """Growth of the number of unfinished requests.

    Attributes:
        growth: Growth of the backlog per arrived request; 1 - 1 / load in an overloaded queue.
        p_value: One-sided p value of no growth.
    """

    growth: float
    p_value: float

    @property
    def is_growing(self) -> bool:
        """Whether the run is saturated: growth is significant and at least 2 % of the arrivals."""
        return self.p_value < _SURE and self.growth >= _LEAST_GROWTH


def warm_up_cut(values: FloatArray) -> int:
    """Return how many values at the beginning to leave out, by MSER-5: at most half of them, in batches of five. Pure.

    The cut minimises the variance of the remaining batches divided by their number: the squared error of their mean.

    Args:
        values: Values of requests in order of arrival, ``[num_requests]``.

    Source: White 1997, An effective truncation heuristic for bias reduction in simulation output.
    """
    num = len(values) // _BATCH
    if num < 2:
        return 0
    batches = values[: num * _BATCH].reshape(num, _BATCH).mean(axis=1)
    tail, tail2 = np.cumsum(batches[::-1])[::-1], np.cumsum(batches[::-1] ** 2)[::-1]
    left = np.arange(num, 0, -1)
    scores = np.maximum(0.0, tail2 / left - (tail / left) ** 2) / left
    return int(np.argmin(scores[: num // 2 + 1])) * _BATCH


def mean_in_system(sent_s: FloatArray, finished_s: FloatArray, edges: FloatArray) -> FloatArray:
    """Return the mean number of requests that were sent and not finished, in each interval between two edges. Pure.

    Args:
        sent_s: Times of sending, seconds, ``[num_requests]``.
        finished_s: Times of the last token, seconds, ``[num_requests]``.
        edges: Edges of the intervals, seconds, ascending, ``[num_intervals + 1]``.
    """

    def waited(times_s: FloatArray) -> FloatArray:
        ordered = np.sort(times_s)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        counts = np.searchsorted(ordered, edges, side="right")
        seconds: FloatArray = counts * edges - sums[counts]
        return seconds

    means: FloatArray = np.diff(waited(sent_s) - waited(finished_s)) / np.diff(edges)
    return means


def backlog_of(sent_s: FloatArray, finished_s: FloatArray) -> Backlog:
    """Return the growth of the number of requests in the system while requests arrive, by regression on time. Pure.

    The line is fitted to the means of at most twenty intervals after the warm-up, and its error is widened for the correlation of
    neighbours. At p < 0.01, plain regression finds 9 % of M/M/1 queues at load 0.9 growing; this one finds 3 %, none by 2 % of arrivals.

    Args:
        sent_s: Times of sending, seconds, ``[num_requests]``.
        finished_s: Times of the last token, seconds, ``[num_requests]``.

    Raises:
        ConfigError: scipy is missing.
    """
    span_s = float(np.ptp(sent_s)) if len(sent_s) else 0.0
    if len(sent_s) < 2 * _BINS_PER_BATCH or not span_s:
        return Backlog(growth=0.0, p_value=1.0)  # too few to tell
    edges = np.linspace(sent_s.min(), sent_s.max(), _BINS + 1)
    counts = mean_in_system(sent_s, finished_s, edges)
    kept = counts[warm_up_cut(counts) :]
    num = len(kept) // _BINS_PER_BATCH
    batches = kept[-num * _BINS_PER_BATCH :].reshape(num, _BINS_PER_BATCH).mean(axis=1)
    times_s = np.arange(num) * _BINS_PER_BATCH * span_s / _BINS
    fit = scipy_stats().linregress(times_s, batches)
    residuals = batches - fit.intercept - fit.slope * times_s
    power = float(residuals @ residuals)
    repeated = float(residuals[:-1] @ residuals[1:]) / power if power > 0 else 0.0
    error = fit.stderr * math.sqrt((1 + max(0.0, repeated)) / (1 - max(0.0, repeated)))
    rate = len(sent_s) / span_s
    score = fit.slope / error if error > 0 else math.copysign(math.inf, fit.slope) if fit.slope else 0.0
    return Backlog(growth=float(fit.slope) / rate, p_value=float(scipy_stats().t(num - 2).sf(score)))


def combined(backlogs: Sequence[Backlog]) -> Backlog:
    """Return the combined result of independent runs: mean growth, and p value by Stouffer's method. Pure.

    Args:
        backlogs: Backlogs of runs with different seeds, at least one.

    Raises:
        ConfigError: scipy is missing.
    """
    normal = scipy_stats().norm
    scores = [float(normal.isf(min(max(backlog.p_value, _LEAST_P), 1 - _LEAST_P))) for backlog in backlogs]
    growth = sum(backlog.growth for backlog in backlogs) / len(backlogs)
    return Backlog(growth=growth, p_value=float(normal.sf(sum(scores) / math.sqrt(len(scores)))))
