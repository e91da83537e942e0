"""Course of a comparison: the same requests for every configuration, until there are enough runs for verdicts.

    rates × swept settings ▶ point ▶ pairs of runs (seed after seed, or one trace) ▶ judge ▶ sensitivity ▶ outcome

The baseline is the first configuration.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from trencadis.console import Advance
from trencadis.errors import ConfigError
from trencadis_tools.compare.candidates import Candidate, check_different, restored
from trencadis_tools.compare.judge import Judgement, difference_of, judge
from trencadis_tools.compare.metrics import Metric
from trencadis_tools.compare.sensitivity import Flip, scaled_step_times
from trencadis_tools.compare.statistics import FIRST_LOOK, MIN_REQUESTS
from trencadis_tools.simulation import Run, StepTimes
from trencadis_tools.workloads import Workload

__all__ = ["Experiment", "Point", "PointResult", "RunAll", "at_rate", "left_open", "rate_of", "run_experiment"]

_FIRST_REQUESTS = 2 * MIN_REQUESTS
"""Requests of the first run of a trace with ``until_decided``; doubled until it is decided."""


class RunAll(Protocol):
    """Runs one workload under each configuration."""

    def __call__(self, candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        """Return one run for each configuration.

        Args:
            candidates: Configurations, in the order of the results.
            workload: Workload, the same object for all candidates.
            pair: Number of the pair; measurements alternate the order of candidates by it.
        """
        ...


@attrs.frozen(kw_only=True)
class Experiment:
    """Configurations, workloads and points of a comparison.

    Attributes:
        candidates: Configurations; the first is the baseline.
        metrics: Metrics of the comparison.
        workload_of: Returns the workload of a seed; equal for all seeds if requests are not drawn.
        is_drawn: Whether seeds give different requests, so that runs are independent.
        num_pairs: Number of pairs of runs, with drawn workloads or pieces; the maximum if ``until_decided``.
        until_decided: Stop when every metric is decided.
        rates: Requests per second, reached by stretching arrival times; empty: the workload's own.
        sweeps: Values of settings by dotted path, one mapping for each point.
        max_requests: Number of requests taken from the start of the workload; 0: all.
    """

    candidates: Sequence[Candidate]
    metrics: Sequence[Metric]
    workload_of: Callable[[int], Workload] = attrs.field(repr=False)
    is_drawn: bool
    num_pairs: int
    until_decided: bool = False
    rates: Sequence[float] = ()
    sweeps: Sequence[Mapping[str, str]] = ({},)
    max_requests: int = 0

    @property
    def needs_token_times(self) -> bool:
        """Whether a metric needs the time of each token."""
        return any(metric.needs_token_times for metric in self.metrics)


@attrs.frozen(kw_only=True)
class Point:
    """Rate and swept settings at which configurations are compared.

    Attributes:
        rate: Requests per second; 0: the workload's own.
        swept: Values of swept settings by dotted path.
    """

    rate: float = 0.0
    swept: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        parts = [f"rate {self.rate:g}"] if self.rate else []
        return ", ".join([*parts, *(f"{path} = {value}" for path, value in self.swept.items())])


@attrs.frozen(kw_only=True)
class PointResult:
    """Results at one point.

    Attributes:
        point: Rate and swept settings.
        candidates: Configurations with the point's settings.
        workloads: Workloads that were run, in the order of seeds.
        runs: Runs by candidate, then by workload.
        judgement: Values, effects and verdicts of the runs.
        reads: View columns and request fields that each candidate's scheduling policy read in the first run; None: not recorded, as
            in a measurement.
    """

    point: Point
    candidates: Sequence[Candidate]
    workloads: Sequence[Workload] = attrs.field(repr=False)
    runs: Sequence[Sequence[Run]] = attrs.field(repr=False)
    judgement: Judgement
    reads: Sequence[frozenset[str] | None] = ()


def left_open(experiment: Experiment) -> list[str]:
    """Return notes, known before the runs, on metrics that will or may have no interval."""
    if experiment.is_drawn:
        if experiment.num_pairs > 1:
            return []
        return ["one run of each configuration has no interval: every verdict stays open. Take more --seeds."]
    found = [
        f"{metric.name}: one run has no interval; its verdict stays open. Take a workload that is drawn from a seed."
        for metric in experiment.metrics
        if metric.is_of_run
    ]
    workload = _prepared(experiment.workload_of(0), Point(), experiment.max_requests)
    num = len(workload.requests)
    if MIN_REQUESTS <= num < 2 * MIN_REQUESTS and len(found) < len(experiment.metrics):
        found.append(
            f'workload "{workload.name}": if the warm-up is longer than {num - MIN_REQUESTS} of its {num} requests, the '
            f"{MIN_REQUESTS} are not left that intervals need. With {2 * MIN_REQUESTS} they are: at most half is warm-up."
        )
    return found


def run_experiment(
    experiment: Experiment,
    run_all: RunAll,
    *,
    step_times: StepTimes | None = None,
    with_step_times: Callable[[StepTimes], RunAll] | None = None,
    note: Advance | None = None,
) -> list[PointResult]:
    """Compare at every point.

    Args:
        experiment: Configurations, workloads and points.
        run_all: Runs a workload under each configuration.
        step_times: Step times whose coefficients the sensitivity check scales; None: no check.
        with_step_times: Returns a ``run_all`` with another model of step times.
        note: Called with the number of runs so far and the maximum number of runs; or None.

    Raises:
        ConfigError: The workload is too short for the statistics, or a configuration cannot be used.
        TrencadisError: A run failed.
    """
    results = []
    models = scaled_step_times(step_times) if step_times is not None and with_step_times is not None else []
    points = list(itertools.product(experiment.sweeps, experiment.rates or (0.0,)))
    count = _Count(note, num_points=len(points), most_of_point=_most_runs(experiment, len(models)))
    for swept, rate in points:
        candidates = experiment.candidates
        if swept:
            candidates = [restored(one.name, one.given, swept, may_import=one.may_import) for one in candidates]
            check_different(candidates)
        point = Point(rate=rate, swept=swept)
        result = _at_point(experiment, point, candidates, count.counted(run_all))
        if with_step_times is not None and models:
            metrics = {metric.name: metric for metric in experiment.metrics}
            run_scaled = [(name, count.counted(with_step_times(model))) for name, model in models]
            flips = _find_flips(result.judgement, metrics, candidates, result.workloads, run_scaled)
            has_claims = any(effect.winner for effect in result.judgement.effects)
            tried = [name for name, _ in models] if has_claims else []
            result = attrs.evolve(result, judgement=result.judgement.with_flips(flips, tried))
        count.point_ends()
        results.append(result)
    return results


class _Count:
    """Counts runs and the maximum number of runs, which falls when a point is decided early or needs no sensitivity check.

    Args:
        note: Called with both numbers; or None.
        num_points: Number of points of the comparison.
        most_of_point: Maximum number of runs of one point.
    """

    def __init__(self, note: Advance | None, *, num_points: int, most_of_point: int) -> None:
        self._note = note
        self._num_left, self._most_of_point = num_points, most_of_point
        self._num_runs, self._most = 0, num_points * most_of_point
        self._tell()

    def counted(self, run_all: RunAll) -> RunAll:
        """Return the function wrapped so that its runs are counted."""

        def counted(candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
            runs = run_all(candidates, workload, pair)
            self._num_runs += len(runs)
            self._tell()
            return runs

        return counted

    def point_ends(self) -> None:
        """Lower the maximum by the runs that a finished point did not need."""
        self._num_left -= 1
        self._most = self._num_runs + self._num_left * self._most_of_point
        self._tell()

    def _tell(self) -> None:
        if self._note is not None:
            self._note(self._num_runs, self._most)


def _most_runs(experiment: Experiment, num_models: int) -> int:
    """Return the maximum number of runs of a point, the sensitivity check included."""
    num_workloads = experiment.num_pairs if experiment.is_drawn else len(_lengths(experiment))
    num_again = experiment.num_pairs if experiment.is_drawn else 1
    return len(experiment.candidates) * (num_workloads + num_models * num_again)


def _find_flips(
    judgement: Judgement,
    metrics: Mapping[str, Metric],
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    models: Sequence[tuple[str, RunAll]],
) -> list[Flip]:
    """Repeat the runs of verdicts "better" with each model of step times, and return the differences whose sign changes."""
    claims = [effect for effect in judgement.effects if effect.verdict == "better"]
    others = {effect.other for effect in claims}
    if not claims:
        return []
    chosen = [candidates[0], *(candidate for candidate in candidates[1:] if candidate.name in others)]
    flips = []
    for scaled, run_all in models:
        runs = list(zip(*(run_all(chosen, workload, pair) for pair, workload in enumerate(workloads)), strict=True))
        names = [candidate.name for candidate in chosen]
        for effect in claims:
            difference = difference_of(metrics[effect.metric], runs[0], runs[names.index(effect.other)])
            if difference * effect.interval.difference < 0:
                flips.append(Flip(metric=effect.metric, other=effect.other, scaled=scaled, difference=difference))
    return flips


def _at_point(experiment: Experiment, point: Point, candidates: Sequence[Candidate], run_all: RunAll) -> PointResult:
    """Run pairs at one point until there are enough for verdicts."""
    is_drawn, until_decided = experiment.is_drawn, experiment.until_decided
    workloads: list[Workload] = []
    runs: list[list[Run]] = [[] for _ in candidates]
    reads: list[frozenset[str] | None] = []
    names = [candidate.name for candidate in candidates]
    num_looks = 1 if is_drawn else len(_lengths(experiment))
    judged = functools.partial(judge, is_drawn=is_drawn, until_decided=until_decided, num_looks=num_looks)
    for pair, workload in enumerate(_workloads(experiment, point)):
        if not is_drawn:  # a longer part of the same trace, from its beginning
            workloads.clear()
            runs = [[] for _ in candidates]
        workloads.append(workload)
        for own, run in zip(runs, run_all(candidates, workload, pair), strict=True):
            own.append(run)
        reads = reads or [own[-1].policy_reads for own in runs]
        if not until_decided or (is_drawn and len(workloads) < FIRST_LOOK):
            continue
        if judged(names, runs, experiment.metrics).is_decided:
            break
    judgement = judged(names, runs, experiment.metrics)
    return PointResult(
        point=point, candidates=candidates, workloads=workloads, runs=runs, judgement=judgement, reads=reads
    )


def _workloads(experiment: Experiment, point: Point) -> Iterator[Workload]:
    """Yield the workload of each seed, or for a trace parts of growing length from its beginning."""
    if experiment.is_drawn:
        for seed in range(experiment.num_pairs):
            yield _prepared(experiment.workload_of(seed), point, experiment.max_requests)
        return
    workload = _prepared(experiment.workload_of(0), point, experiment.max_requests)
    num = len(workload.requests)
    if num < MIN_REQUESTS:
        raise ConfigError(
            f'workload "{workload.name}": {num} requests, drawn without a seed. Within one run intervals need {MIN_REQUESTS}.',
            hint="Take a longer workload, or one that is generated, with --seeds.",
        )
    for length in _lengths(experiment):
        yield attrs.evolve(workload, requests=workload.requests[:length])


def _lengths(experiment: Experiment) -> list[int]:
    """Return the number of requests of each successive run of a trace."""
    num = len(experiment.workload_of(0).requests)
    num = min(num, experiment.max_requests or num)
    lengths = []
    length = _FIRST_REQUESTS
    while experiment.until_decided and length < num:
        lengths.append(length)
        length *= 2
    return [*lengths, num]


def _prepared(workload: Workload, point: Point, max_requests: int) -> Workload:
    """Return the part of a workload to run, at the rate of the point; ``max_tokens`` follows from the whole workload. Pure."""
    longest = max(request.num_output_tokens for request in workload.requests)
    requests = workload.requests[:max_requests] if max_requests else workload.requests
    requests = tuple(attrs.evolve(one, max_tokens=one.max_tokens or longest) for one in requests)
    workload = attrs.evolve(workload, requests=requests)
    return at_rate(workload, point.rate) if point.rate else workload


def rate_of(workload: Workload) -> float:
    """Return the arrival rate of requests that do not follow another one, requests/s; 0 if they arrive at once. Pure."""
    times_s = [request.arrival_s for request in workload.requests if not request.after]
    span_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / span_s if span_s else 0.0


def at_rate(workload: Workload, rate: float) -> Workload:
    """Return the same requests at another rate, with stretched arrival times and no new draws. Pure.

    Args:
        workload: Workload with different arrival times.
        rate: Requests per second.

    Raises:
        ConfigError: All requests come at once.
    """
    now = rate_of(workload)
    if not now:
        raise ConfigError(
            f'workload "{workload.name}": all requests come at once, which no --rate can stretch.',
            hint="Leave --rate out, or take a workload with arrivals.",
        )
    stretch = now / rate
    requests = tuple(attrs.evolve(one, arrival_s=one.arrival_s * stretch) for one in workload.requests)
    return attrs.evolve(workload, requests=requests)
