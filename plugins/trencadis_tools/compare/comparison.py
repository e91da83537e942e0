"""A comparison by its arguments, which its record holds, so that it can be repeated from the record alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from trencadis.console import Advance
from trencadis.errors import ConfigError
from trencadis_tools.compare.assumed import drafts_in_words, step_times_in_words
from trencadis_tools.compare.candidates import Candidate, restored, sweep_points
from trencadis_tools.compare.experiment import Experiment, PointResult, RunAll, left_open, run_experiment
from trencadis_tools.compare.live import LiveRuns, pieces_of
from trencadis_tools.compare.metrics import metric_of
from trencadis_tools.compare.reads import WatchedRegistry
from trencadis_tools.compare.record import record_of
from trencadis_tools.lab import scipy_stats
from trencadis_tools.simulation import DraftFacts, Run, StepTimes, load_drafts, simulate
from trencadis_tools.simulation.drafts import one_seed, speculates
from trencadis_tools.simulation.step_times import LinearStepTimes, load_step_times
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["Arguments", "Comparison", "arguments_from", "candidates_in", "compare"]

_NUM_SEEDS, _MOST_SEEDS = 10, 200


@attrs.frozen(kw_only=True)
class Arguments:
    """Arguments of a comparison, in plain values.

    Attributes:
        configs: Name of each configuration, and the values set in it by dotted path.
        workload: Path of a workload file or trace, or name of a workload.
        step_times: Path of a file of fitted step times or a device sheet; empty: the defaults of ``LinearStepTimes``.
        replicas: Number of simulated engines behind one router.
        seeds: Number of independent runs of a drawn workload, or of pieces of a trace in a measurement; the maximum if
            ``until_decided``. 0: 10, or 200 if ``until_decided``.
        until_decided: Stop when every metric is decided.
        live: Measure real engines instead of simulating.
        metrics: Names of the metrics.
        rates: Requests per second, one point for each; empty: the workload's own rate.
        sweep: Swept settings, each ``table.key=value,value``.
        max_requests: Number of requests taken from the start of the workload; 0: all.
        sensitivity: Repeat runs with verdict "better" with scaled step times.
        drafts: Acceptance of drafts, or path of a file with it; empty: unknown.
    """

    configs: Sequence[tuple[str, Mapping[str, Any]]]
    workload: str
    step_times: str = ""
    replicas: int = 1
    seeds: int = 0
    until_decided: bool = False
    live: bool = False
    metrics: Sequence[str] = ()
    rates: Sequence[float] = ()
    sweep: Sequence[str] = ()
    max_requests: int = 0
    sensitivity: bool = True
    drafts: str = ""


@attrs.frozen(kw_only=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        arguments: Arguments of the comparison.
        candidates: Configurations before any setting is swept.
        results: Results of all points.
        assumed: Assumed step times and acceptance of drafts, in words; empty for a measurement.
        record: Content of the record file.
    """

    arguments: Arguments
    candidates: Sequence[Candidate]
    results: Sequence[PointResult]
    assumed: Sequence[str]
    record: Mapping[str, Any] = attrs.field(repr=False)


def arguments_from(table: object) -> Arguments:
    """Return the arguments of a record after checking the type of every value. Pure.

    Raises:
        ValueError: The table does not hold arguments of a comparison.
    """
    try:
        return msgspec.convert(table, Arguments)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def candidates_in(arguments: Arguments, *, may_import: bool = False) -> list[Candidate]:
    """Return the configurations of a comparison, before any setting is swept.

    Args:
        arguments: Arguments of the comparison.
        may_import: Whether the arguments come from the operator, and not from a received record.

    Raises:
        ImportPathRefusedError: A value that does not come from the operator is an import path.
        ConfigError: A value cannot be used.
        PluginError: No plugin offers a component of that name.
    """
    return [restored(name, given, may_import=may_import) for name, given in arguments.configs]


def compare(
    arguments: Arguments,
    *,
    note: Advance | None = None,
    warn: Callable[[str], None] | None = None,
    may_import: bool = False,
) -> Comparison:
    """Run a comparison.

    Args:
        arguments: Arguments of the comparison.
        note: Called with the number of runs so far and the maximum number of runs; or None.
        warn: Called before the runs with each sentence of :func:`left_open`; or None.
        may_import: Whether the arguments come from the operator, and not from a received record.

    Raises:
        ConfigError: An argument, file or configuration cannot be used, or the workload is too short.
        TrencadisError: A run failed.
    """
    _check(arguments)
    candidates = candidates_in(arguments, may_import=may_import)
    experiment = _experiment(arguments, candidates)
    if warn is not None:
        for line in [*left_open(experiment), *_one_seed(arguments, experiment)]:
            warn(line)
    if arguments.live:
        with LiveRuns(token_times=experiment.needs_token_times) as live:
            results = run_experiment(experiment, live, note=note)
        return _compared(arguments, candidates, results, "", ())
    step_times = _step_times(arguments.step_times)
    drafts = load_drafts(arguments.drafts)
    with_step_times = functools.partial(_simulated, arguments.replicas, drafts, experiment.needs_token_times)
    results = run_experiment(
        experiment,
        with_step_times(step_times),
        step_times=step_times if arguments.sensitivity else None,
        with_step_times=with_step_times,
        note=note,
    )
    exactly = f"{step_times!r}{f', drafts {drafts!r}' if drafts else ''}"
    assumed = [f"step times: {step_times_in_words(arguments.step_times, step_times)}", *drafts_in_words(drafts)]
    return _compared(arguments, candidates, results, exactly, assumed)


def _compared(
    arguments: Arguments,
    candidates: Sequence[Candidate],
    results: Sequence[PointResult],
    step_times: str,
    assumed: Sequence[str],
) -> Comparison:
    written = attrs.asdict(arguments)
    if not arguments.drafts:
        del written["drafts"]
    record = record_of(written, step_times, results)
    return Comparison(arguments=arguments, candidates=candidates, results=results, assumed=assumed, record=record)


def _one_seed(arguments: Arguments, experiment: Experiment) -> list[str]:
    """Return in words what is drawn from one seed alone; nothing for a measurement, which runs pieces of a trace or several seeds. Pure."""
    if arguments.live or (experiment.is_drawn and experiment.num_pairs > 1):
        return []
    drafts = any(speculates(one.config) for one in experiment.candidates)
    more = "Take more with --seeds." if experiment.is_drawn else "Take a workload that is drawn, and --seeds."
    words = one_seed("seed 0", requests=experiment.is_drawn, drafts=drafts, more=more)
    return [words] if words else []


def _check(arguments: Arguments) -> None:
    """Refuse arguments that contradict each other or allow no verdict."""
    scipy_stats()
    for name in ("replicas", "seeds", "max_requests"):
        least = int(name == "replicas")
        if getattr(arguments, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"flag --{flag}: {getattr(arguments, name)} is less than {least}.")
    if any(not 0 < rate < math.inf for rate in arguments.rates):
        raise ConfigError("flag --rate: a rate must be above 0.", hint="Write requests a second: --rate 1,2,4.")
    if arguments.live and arguments.replicas > 1:
        raise ConfigError("flag --live: one engine of each configuration is measured.", hint="Leave --replicas out.")
    if arguments.live and arguments.step_times:
        raise ConfigError("flag --live: steps take the time they take.", hint="Leave --step-times out.")
    if arguments.live and arguments.drafts:
        raise ConfigError("flag --live: drafts are right as often as they are.", hint="Leave --drafts out.")


def _experiment(arguments: Arguments, candidates: Sequence[Candidate]) -> Experiment:
    metrics = [metric_of(name) for name in arguments.metrics]
    workload_of, is_drawn = _workloads(arguments)
    if not is_drawn and arguments.until_decided:
        of_runs = [metric.name for metric in metrics if metric.is_of_run]
        if of_runs:
            raise ConfigError(
                f"flag --until-decided: {', '.join(of_runs)} cannot be watched within one run: it has one value.",
                hint="Name metrics of requests with --metric, or take a workload that is drawn from a seed.",
            )
    return Experiment(
        candidates=candidates,
        metrics=metrics,
        workload_of=workload_of,
        is_drawn=is_drawn,
        num_pairs=arguments.seeds or (_MOST_SEEDS if arguments.until_decided else _NUM_SEEDS),
        until_decided=arguments.until_decided,
        rates=arguments.rates,
        sweeps=sweep_points(arguments.sweep),
        max_requests=arguments.max_requests,
    )


def _workloads(arguments: Arguments) -> tuple[Callable[[int], Workload], bool]:
    """Return a function from seed to workload, and whether seeds are independent (times or lengths are drawn).

    Drawing tenants over a recorded trace does not make seeds independent.
    """

    def drawn(seed: int) -> Workload:
        return load_workload(arguments.workload, seed=seed)

    first = drawn(0)
    if _sizes(drawn(1)) != _sizes(first):
        return drawn, True
    if arguments.live:
        pieces = pieces_of(first, arguments.seeds or _NUM_SEEDS)
        return pieces.__getitem__, True
    if arguments.seeds > 1:
        raise ConfigError(
            f'flag --seeds: the requests of "{arguments.workload}" are not drawn; every seed gives the same.',
            hint="Leave --seeds out: within one run, blocks of requests are compared.",
        )
    return (lambda _seed: first), False


def _sizes(workload: Workload) -> list[tuple[float, int, int]]:
    return [(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens) for one in workload.requests]


def _step_times(name: str) -> StepTimes:
    return load_step_times(name) if name else LinearStepTimes()


def _simulated(replicas: int, drafts: Mapping[str, DraftFacts], token_times: bool, step_times: StepTimes) -> RunAll:
    """Return a function that simulates a workload under each configuration, and in the first pair records what policies read."""

    def run(candidate: Candidate, workload: Workload, pair: int) -> Run:
        watched = None if pair else WatchedRegistry(candidate.registry)
        found = simulate(
            candidate.config,
            watched or candidate.registry,
            workload,
            step_times=step_times,
            replicas=replicas,
            drafts=drafts,
            token_times=token_times,
        )
        return found if watched is None else attrs.evolve(found, policy_reads=frozenset(watched.reads))

    def run_all(candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        return [run(one, workload, pair) for one in candidates]

    return run_all
