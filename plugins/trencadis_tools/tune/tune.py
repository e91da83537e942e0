"""One tuning from beginning to end.

workload ▶ parts ┐
step times ──────┼▶ search in the simulator ▶ check on the part held out ▶ measure the best two and the start ▶ result
configuration ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from trencadis.errors import ConfigError, TrencadisError
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.experiment import rate_of
from trencadis_tools.simulation import StepTimes, load_drafts
from trencadis_tools.simulation.drafts import facts_of, one_seed, speculates
from trencadis_tools.simulation.fleet import has_store
from trencadis_tools.simulation.step_times import BucketStepTimes, SheetStepTimes, load_step_times
from trencadis_tools.tune.confirm import Measured, measure
from trencadis_tools.tune.measured import MeasuredSteps, measure_steps
from trencadis_tools.tune.memory import memory_of
from trencadis_tools.tune.search import Found, Parts, search
from trencadis_tools.tune.slo import Slo, parse_slo
from trencadis_tools.tune.space import Space
from trencadis_tools.tune.trials import Trials
from trencadis_tools.workloads import Workload, WorkloadRequest, load_workload

__all__ = ["Settings", "Tuned", "tune"]

_FEWEST = 20
"""Minimum number of requests of a part."""
_OTHER_MODEL = "Take another workload or model, or name --step-times of a model that takes longer requests."
_DOUBTFUL = "The step times do not predict steps of the same run within 20 %: is the machine busy with something else?"
_OF_SHEET = "step times of a device sheet say nothing of this machine; without --step-times they are fitted here"


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of a tuning, in plain values.

    Attributes:
        slo: Service-level objectives as text.
        workload: Path of a workload file or trace, or name of a workload.
        step_times: Path of a file of fitted step times or a device sheet; empty: they are fitted here.
        replicas: Number of simulated engines behind one router.
        budget: Maximum number of simulations of the search.
        limit: Number of requests to search with, and of further requests to check with.
        confirm: Measure the start and the best two on real engines.
        keep: Dotted paths or tables that stay unchanged.
        drafts: Acceptance of drafts, or path of a file with it; empty: unknown.
        seed: Seed of the requests to search with; those to check with have the next seed. None: the workload's seed.
    """

    slo: str
    workload: str
    step_times: str = ""
    replicas: int = 1
    budget: int = 100
    limit: int = 500
    confirm: bool = True
    keep: Sequence[str] = ()
    drafts: str = ""
    seed: int | None = None


@attrs.frozen(kw_only=True)
class Tuned:
    """Result of a tuning.

    Attributes:
        settings: Settings of the tuning.
        start: Starting configuration.
        slo: Service-level objectives.
        parts: Parts of the workload: those to search with in order of length, then the held-out one.
        left_out: Requests that the model cannot take, in words; empty: none.
        one_seed: Note on values drawn from one seed only; empty: none.
        step_times: Source of the step times, in words.
        step_times_facts: Coefficients of the step times.
        memory: Number of KV blocks and its source, in words.
        trials: All simulations.
        found: Result of the search.
        measured: Measurements of start, best and second, in this order; empty: not measured.
        not_measured: Reason why there is no measurement; empty if there is one.
    """

    settings: Settings
    start: Candidate
    slo: Slo
    parts: Sequence[Workload]
    left_out: str
    one_seed: str
    step_times: str
    step_times_facts: Any
    memory: str
    trials: Trials
    found: Found
    measured: Sequence[Measured]
    not_measured: str


def tune(
    settings: Settings,
    start: Candidate,
    *,
    note: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Search, check and measure.

    Args:
        settings: Settings of the tuning.
        start: Starting configuration.
        note: Called with the number of simulations so far.
        say: Called with a sentence before each long stage.

    Raises:
        ConfigError: A setting, the workload or the start cannot be used.
        TrencadisError: The engine cannot be built, or a policy failed.
    """
    slo = parse_slo(settings.slo)
    _check(settings)
    drafts = load_drafts(settings.drafts)
    facts_of(start.config, drafts)
    parts, rungs = parts_of(settings.workload, settings.limit, seed=settings.seed)
    slo.check(parts[-1])
    steps: MeasuredSteps | None = None
    if settings.step_times:
        step_times, words = load_step_times(settings.step_times), settings.step_times
        facts: Any = repr(step_times)
    else:
        say("Running the configured engine for its step times.")
        steps = measure_steps(start, parts[0])
        step_times, words, facts = steps.times, steps.words, steps.facts
        longest = steps.max_model_len
        parts, rungs = parts_of(settings.workload, settings.limit, max_model_len=longest, seed=settings.seed)
        slo.check(parts[-1])
        if rungs.left_out:
            say(f"{rungs.left_out}.")
        if steps.is_doubtful:
            say(_DOUBTFUL)
    memory = memory_of(
        start.config,
        step_times,
        parts,
        measured_blocks=steps.num_blocks if steps else 0,
        block_size=steps.block_size if steps else 0,
        fillable_blocks=steps.fillable_blocks if steps else 0,
    )
    space = Space(
        start.config,
        start.registry,
        slo=slo,
        step_times=step_times,
        shares=any(one.block_ids or one.after for one in parts[0].requests),
        replicas=settings.replicas,
        is_short_of_blocks=memory.is_short,
        layout=step_times.layout if isinstance(step_times, BucketStepTimes) else "ragged",
        keep=settings.keep,
    )
    trials = Trials(
        start, slo, step_times, parts, replicas=settings.replicas, assumed=memory.assumed, note=note, drafts=drafts
    )
    found = search(space, trials, rungs, hint=rate_of(parts[0]), budget=settings.budget)
    measured, why = _measured(settings, slo, trials, found, parts, say, step_times)
    return Tuned(
        settings=settings,
        start=start,
        slo=slo,
        parts=parts,
        left_out=rungs.left_out,
        one_seed=_one_seed(start, parts, rungs),
        step_times=words,
        step_times_facts=facts,
        memory=memory.words,
        trials=trials,
        found=found,
        measured=measured,
        not_measured=why,
    )


def _check(settings: Settings) -> None:
    least = {"replicas": 1, "budget": 20, "limit": _FEWEST}
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise ConfigError(f"flag --{name}: {getattr(settings, name)} is less than {value}.")


def _one_seed(start: Candidate, parts: Sequence[Workload], rungs: Parts) -> str:
    """Return a note on values drawn from one seed only; empty: none. Pure."""
    seed, other = rungs.seeds or (parts[0].seed, parts[0].seed)
    return one_seed(
        f"seed {seed} to search with and seed {other} to check with" if rungs.seeds else f"seed {seed}",
        requests=rungs.seeds is not None,
        drafts=speculates(start.config),
        more="Tune again with another --seed, and see whether it finds the same.",
    )


def parts_of(
    name: str, limit: int, *, max_model_len: int | None = None, seed: int | None = None
) -> tuple[list[Workload], Parts]:
    """Return the parts of a workload: those to search with, the shortest first, then one of other requests.

    The last part of a drawn workload has the next seed; that of a trace follows the other parts.

    Args:
        name: Path of a workload file or trace, or name of a workload.
        limit: Number of requests of the longest part to search with, and of the last part.
        max_model_len: Maximum tokens of a request; longer ones are left out. None: no maximum.
        seed: Seed in place of the workload's; None: the workload's.

    Raises:
        ConfigError: The workload does not exist, is too short, or all its requests arrive at once.
    """
    every = load_workload(name, seed=seed)
    first, other = (fitting(one.requests, max_model_len) for one in (every, load_workload(name, seed=every.seed + 1)))
    left_out = _left_out(every.requests, first, max_model_len)
    is_drawn = other != first
    if is_drawn:
        searched, held_out = _cut(first, 0, limit), _cut(other, 0, limit)
    else:
        limit = min(limit, len(first) // 2)
        searched, held_out = _cut(first, 0, limit), _cut(first, limit, 2 * limit)
    if len(searched) < _FEWEST or len(held_out) < _FEWEST:
        raise ConfigError(
            f'workload "{name}": {len(first)} requests are too few: {_FEWEST} are needed to search with, and as many to check.'
            + (f" {left_out}." if left_out else ""),
            hint=_OTHER_MODEL if left_out else "Take a longer workload.",
        )
    longest_output = max(one.num_output_tokens for one in first)
    rungs = [searched[: len(searched) // parts] for parts in (4, 2, 1) if len(searched) // parts >= _FEWEST]
    names = [f"first {len(rung)}" for rung in rungs] + [f"{len(held_out)} others"]
    parts = [
        attrs.evolve(every, name=own, requests=_started(requests, longest_output))
        for own, requests in zip(names, [*rungs, held_out], strict=True)
    ]
    if not all(rate_of(part) for part in parts):
        raise ConfigError(
            f'workload "{name}": all requests come at once, which no other rate changes.',
            hint="Take a workload with arrivals.",
        )
    return parts, Parts(
        rungs=names[:-1],
        held_out=names[-1],
        left_out=left_out,
        seeds=(every.seed, every.seed + 1) if is_drawn else None,
    )


def _cut(requests: Sequence[WorkloadRequest], first: int, end: int) -> list[WorkloadRequest]:
    """Return a range of requests, without those that follow a request outside it."""
    left, known = [], set()
    for one in requests[first:end]:
        if not one.after or one.after in known:
            known.add(one.request_id)
            left.append(one)
    return left


def _started(requests: Sequence[WorkloadRequest], longest_output: int) -> tuple[WorkloadRequest, ...]:
    """Return requests shifted to start at time 0; ``max_tokens`` does not depend on the part. Pure."""
    start_s = requests[0].arrival_s
    return tuple(
        attrs.evolve(one, arrival_s=one.arrival_s - start_s, max_tokens=one.max_tokens or longest_output)
        for one in requests
    )


def fitting(requests: Sequence[WorkloadRequest], max_model_len: int | None) -> Sequence[WorkloadRequest]:
    """Return requests without those longer than ``max_model_len`` (prompt and answer) and their followers. Pure."""
    if max_model_len is None:
        return requests
    left, gone = [], set()
    for one in requests:
        if one.num_prompt_tokens + one.num_output_tokens > max_model_len or one.after in gone:
            gone.add(one.request_id)
        else:
            left.append(one)
    return left


def _left_out(every: Sequence[WorkloadRequest], left: Sequence[WorkloadRequest], max_model_len: int | None) -> str:
    """Return a note on requests longer than ``max_model_len``; empty: none. Pure."""
    if len(left) == len(every):
        return ""
    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in every)
    return (
        f"{len(every) - len(left)} of {len(every)} requests are left out: they, or one that they follow, have more than the "
        f"{max_model_len} tokens that this model takes; the longest has {longest}"
    )


def _measured(
    settings: Settings,
    slo: Slo,
    trials: Trials,
    found: Found,
    parts: Sequence[Workload],
    say: Callable[[str], None],
    step_times: StepTimes,
) -> tuple[Sequence[Measured], str]:
    """Measure the start and the best two at the rate that the best serves, or return why not."""
    if isinstance(step_times, SheetStepTimes):
        return (), _OF_SHEET
    if not settings.confirm:
        return (), "--no-confirm"
    if settings.replicas > 1:
        return (), "one engine is measured, and --replicas asks for more"
    if not found.best.rate:
        return (), "no rate keeps the objectives"
    if has_store(trials.configured(found.best.changes).config):
        return (), "the KV store is a simulated one"
    say("Measuring the start and the best two in turns.")
    chosen = [found.start, found.best, *([found.second] if found.second else [])]
    names = ("start", "best", "second")
    candidates = [
        attrs.evolve(trials.configured(one.changes), name=name) for name, one in zip(names, chosen, strict=False) if one
    ]
    if not found.best.changes:
        candidates.pop(1)
    try:
        return measure(candidates, parts[-1], slo, rate=found.best.rate), ""
    except TrencadisError as error:  # keep the result of the search
        return (), f"an engine cannot run here: {error}"
