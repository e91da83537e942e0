"""Runs of several configurations on the same requests: values, intervals against the baseline, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from trencadis.records import FloatArray, Int64Array
from trencadis_tools.compare.metrics import Metric
from trencadis_tools.compare.sensitivity import Flip
from trencadis_tools.compare.statistics import (
    ALPHA,
    MIN_REQUESTS,
    Interval,
    SequencePoint,
    block_interval,
    block_length,
    confidence_sequence,
    holm,
    run_interval,
)
from trencadis_tools.compare.steady_state import Backlog, backlog_of, combined, warm_up_cut
from trencadis_tools.simulation import Run

__all__ = ["MARGIN", "MAX_FAILED_RATIO", "Effect", "Judgement", "Outcome", "difference_of", "judge"]

MARGIN = 0.02
"""Differences below 2 % of the baseline do not matter: a larger one is needed for "better", an interval within it for "equal"."""

MAX_FAILED_RATIO = 0.01
"""Maximum share of unanswered requests, since latencies only include requests that every configuration answered."""


@attrs.frozen(kw_only=True)
class Outcome:
    """Values of one configuration.

    Attributes:
        name: Name of the configuration.
        values: Value by name of the metric: over all counted requests of one run, or the mean over runs; NaN for latencies if the
            backlog grows.
        num_requests: Number of requests in all runs.
        num_failed: Number of requests that were refused or failed.
        backlog: Growth of the number of requests in the system.
    """

    name: str
    values: Mapping[str, float]
    num_requests: int
    num_failed: int
    backlog: Backlog


@attrs.frozen(kw_only=True)
class Effect:
    """Difference of one configuration from the baseline in one metric.

    Attributes:
        metric: Name of the metric.
        other: Name of the configuration compared with the baseline.
        baseline_value: Value of the baseline.
        other_value: Value of the other configuration.
        interval: Interval of the difference.
        adjusted_p: p value of the interval, adjusted by Holm over all configurations with this metric.
        verdict: ``better``, ``equal``, ``open``, or ``unstable`` where a backlog grows.
        winner: Name of the better configuration; empty if none is.
        reasons: Reasons, in words, why a verdict is open although the interval alone would decide it.
        differences: Differences of the units in order: runs, or blocks of requests for a mean.
        sequence: Confidence sequence over ``differences``.
    """

    metric: str
    other: str
    baseline_value: float
    other_value: float
    interval: Interval
    adjusted_p: float = 1.0
    verdict: str = "open"
    winner: str = ""
    reasons: tuple[str, ...] = ()
    differences: tuple[float, ...] = ()
    sequence: tuple[SequencePoint, ...] = ()

    def relative(self, difference: float) -> float:
        """Return a difference divided by the baseline's absolute value; infinite if that is 0. Pure."""
        if self.baseline_value:
            return difference / abs(self.baseline_value)
        return math.copysign(math.inf, difference) if difference else 0.0


@attrs.frozen(kw_only=True)
class Judgement:
    """Outcomes and effects of all configurations.

    Attributes:
        outcomes: Outcome of each configuration, the baseline first.
        effects: Effects ordered by metric, then by configuration.
        num_warm_up: Number of requests excluded at the beginning of each run, equal for all configurations.
        tried: Scaled step times used to check each verdict "better", such as ``base_s × 0.8``; empty if there was no such verdict
            or no check.
    """

    outcomes: Sequence[Outcome]
    effects: Sequence[Effect]
    num_warm_up: Sequence[int]
    tried: Sequence[str] = ()

    @property
    def is_decided(self) -> bool:
        """Whether no verdict is open, so that more runs change nothing."""
        return all(effect.verdict != "open" for effect in self.effects)

    def with_flips(self, flips: Sequence[Flip], tried: Sequence[str] = ()) -> Judgement:
        """Return the judgement with open verdicts where the sign depends on a coefficient of the step times. Pure."""
        return attrs.evolve(self, tried=tuple(tried), effects=[_with_flips(effect, flips) for effect in self.effects])


def _with_flips(effect: Effect, flips: Sequence[Flip]) -> Effect:
    own = [flip.scaled for flip in flips if (flip.metric, flip.other) == (effect.metric, effect.other)]
    if not own:
        return effect
    reason = f"the sign changes with step times of {', '.join(own)}"
    return attrs.evolve(effect, verdict="open", winner="", reasons=(*effect.reasons, reason))


@attrs.frozen(kw_only=True)
class _Runs:
    """All runs, and the requests of them that count."""

    names: Sequence[str]
    runs: Sequence[Sequence[Run]]
    kept: Sequence[Int64Array]  # indices of counted requests, one array for each workload


def judge(
    names: Sequence[str],
    runs: Sequence[Sequence[Run]],
    metrics: Sequence[Metric],
    *,
    is_drawn: bool,
    until_decided: bool = False,
    num_looks: int = 1,
) -> Judgement:
    """Compare every configuration with the first. Pure.

    Args:
        names: Names of the configurations.
        runs: Runs by configuration, then by workload.
        metrics: Metrics of the comparison.
        is_drawn: True: workloads are independent and the unit is the run; False: there is one workload and the unit is the block of
            requests.
        until_decided: Intervals hold for any number of looks; those of quantiles within one run hold for ``num_looks`` looks.
        num_looks: Number of looks at one run as it grows.

    Raises:
        ConfigError: scipy is missing.
    """
    kept, num_warm_up = zip(*(_counting([own[place] for own in runs]) for place in range(len(runs[0]))), strict=True)
    all_runs = _Runs(names=names, runs=runs, kept=kept)
    outcomes = [_outcome(all_runs, place, metrics) for place in range(len(names))]
    effects = []
    for metric in metrics:
        found = [
            _effect(all_runs, outcomes, metric, place, is_drawn, until_decided, num_looks)
            for place in range(1, len(names))
        ]
        adjusted = holm([effect.interval.p_value for effect in found])
        for effect, other, p_value in zip(found, outcomes[1:], adjusted, strict=True):
            effects.append(_decided(attrs.evolve(effect, adjusted_p=p_value), metric, outcomes[0], other))
    return Judgement(outcomes=outcomes, effects=effects, num_warm_up=num_warm_up)


def difference_of(metric: Metric, baseline: Sequence[Run], other: Sequence[Run]) -> float:
    """Return the difference of a metric between two configurations, as :func:`judge` does. Pure.

    Args:
        metric: Metric to compare.
        baseline: Runs of the baseline.
        other: Runs of the other configuration on the same workloads.
    """
    kept = [_counting(pair)[0] for pair in zip(baseline, other, strict=True)]
    pair = _Runs(names=("", ""), runs=(baseline, other), kept=kept)
    return _value(pair, 1, metric) - _value(pair, 0, metric)


def _counting(runs: Sequence[Run]) -> tuple[Int64Array, int]:
    """Return the requests that every configuration answered after the warm-up, and the number of warm-up requests.

    The end of the warm-up is computed from the number of requests in the system at each arrival, which does not depend on
    the widely varying lengths of requests.
    """
    times = [_times(run) for run in runs]
    answered = np.flatnonzero(np.logical_and.reduce([np.isfinite(finished_s) for _, finished_s in times]))
    cut = 0
    for all_sent_s, all_finished_s in times:
        sent_s, finished_s = all_sent_s[answered], np.sort(all_finished_s[answered])
        ahead = np.searchsorted(np.sort(sent_s), sent_s) - np.searchsorted(finished_s, sent_s, side="right")
        cut = max(cut, warm_up_cut(ahead.astype(np.float64)))
    return answered[cut:], cut


def _times(run: Run) -> tuple[FloatArray, FloatArray]:
    sent_s = np.array([record.sent_s for record in run.records], np.float64)
    finished_s = np.array([math.nan if record.error else record.finished_s for record in run.records], np.float64)
    return sent_s, finished_s


def _outcome(runs: _Runs, place: int, metrics: Sequence[Metric]) -> Outcome:
    backlogs, num_failed = [], 0
    for run in runs.runs[place]:
        sent_s, finished_s = _times(run)
        answered = np.isfinite(finished_s)
        num_failed += int((~answered).sum())
        backlogs.append(backlog_of(sent_s[answered], finished_s[answered]))
    backlog = combined(backlogs)
    hidden = {metric.name for metric in metrics if metric.is_latency and backlog.is_growing}
    return Outcome(
        name=runs.names[place],
        values={one.name: math.nan if one.name in hidden else _value(runs, place, one) for one in metrics},
        num_requests=sum(len(run.records) for run in runs.runs[place]),
        num_failed=num_failed,
        backlog=backlog,
    )


def _of_runs(runs: _Runs, place: int, metric: Metric) -> FloatArray:
    """Return the metric of each run, ``[num_runs]``."""
    own = zip(runs.runs[place], runs.kept, strict=True)
    if metric.is_of_run:
        return np.array([metric.of_run(run, kept) for run, kept in own])
    return np.array([metric.summary(metric.values(run, kept)) for run, kept in own])


def _value(runs: _Runs, place: int, metric: Metric) -> float:
    values = _of_runs(runs, place, metric)
    values = values[~np.isnan(values)]
    return float(np.mean(values)) if len(values) else math.nan


def _effect(
    runs: _Runs,
    outcomes: Sequence[Outcome],
    metric: Metric,
    place: int,
    is_drawn: bool,
    until_decided: bool,
    num_looks: int,
) -> Effect:
    """Return the effect of one configuration without a verdict."""
    differences = np.zeros(0)
    if is_drawn:
        differences = _of_runs(runs, place, metric) - _of_runs(runs, 0, metric)
        differences = differences[~np.isnan(differences)]
        interval = _nothing("runs") if not len(differences) else run_interval(differences)
    elif metric.is_of_run:
        interval = _nothing("one run", outcomes[place].values[metric.name] - outcomes[0].values[metric.name])
    else:
        interval, differences = _within_run(runs, metric, place, num_looks)
    sequence = tuple(confidence_sequence(differences)) if len(differences) else ()
    if until_decided and sequence:
        last, unit = sequence[-1], "runs" if is_drawn else interval.method
        interval = attrs.evolve(
            interval,
            difference=last.difference,
            low=last.low,
            high=last.high,
            p_value=last.p_value,
            num_units=last.num_pairs,
            method=f"sequence of {unit}",
        )
    return Effect(
        metric=metric.name,
        other=runs.names[place],
        baseline_value=outcomes[0].values[metric.name],
        other_value=outcomes[place].values[metric.name],
        interval=interval,
        differences=tuple(differences.tolist()),
        sequence=sequence,
    )


def _within_run(runs: _Runs, metric: Metric, place: int, num_looks: int) -> tuple[Interval, FloatArray]:
    """Return the interval by blocks of requests, and for a mean the differences of the blocks."""
    baseline, other = (metric.values(runs.runs[one][0], runs.kept[0]) for one in (0, place))
    both = ~np.isnan(baseline) & ~np.isnan(other)
    baseline, other = baseline[both], other[both]
    if len(baseline) < MIN_REQUESTS:
        difference = metric.summary(other) - metric.summary(baseline)
        return _nothing(f"{len(baseline)} requests after the warm-up", difference), np.zeros(0)
    if metric.quantile is not None:
        return block_interval(baseline, other, quantile=metric.quantile, num_looks=num_looks), np.zeros(0)
    interval = block_interval(baseline, other)
    length, _ = block_length(other - baseline)
    num = len(baseline) // length
    return interval, (other - baseline)[: num * length].reshape(num, length).mean(axis=1)


def _nothing(method: str, difference: float = math.nan) -> Interval:
    return Interval(difference=difference, low=-math.inf, high=math.inf, p_value=1.0, num_units=1, method=method)


def _decided(effect: Effect, metric: Metric, baseline: Outcome, other: Outcome) -> Effect:
    """Return an effect with its verdict."""
    interval = effect.interval
    if metric.is_latency and (baseline.backlog.is_growing or other.backlog.is_growing):
        return attrs.evolve(effect, verdict="unstable", interval=_nothing("unstable"), differences=(), sequence=())
    failed = [one for one in (baseline, other) if one.num_failed > MAX_FAILED_RATIO * one.num_requests]
    reasons = [f"{one.num_failed} of {one.num_requests} requests failed under {one.name}" for one in failed]
    if not interval.is_reliable:
        reasons.append("differences are correlated over too many requests for the length of the run")
    if reasons or math.isnan(interval.difference):
        return attrs.evolve(effect, reasons=tuple(reasons))
    margin = MARGIN * abs(effect.baseline_value)
    excludes_zero = (interval.low > 0 or interval.high < 0) and effect.adjusted_p <= ALPHA
    if excludes_zero and abs(interval.difference) >= margin:
        is_larger = interval.difference > 0
        winner = other if is_larger == metric.larger_is_better else baseline
        return attrs.evolve(effect, verdict="better", winner=winner.name)
    if -margin <= interval.low and interval.high <= margin:
        return attrs.evolve(effect, verdict="equal")
    return effect
