"""Simulations of one workload under changed configurations and rates, counted and cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trencadis.errors import ConfigError, PluginError, StepFailedError, TrencadisError
from trencadis_tools.compare.candidates import Candidate, restored
from trencadis_tools.compare.experiment import at_rate
from trencadis_tools.simulation import DraftFacts, Run, StepTimes, simulate
from trencadis_tools.tune.slo import Slo
from trencadis_tools.workloads import Workload

__all__ = ["Capacity", "Changes", "Trial", "Trials", "capacity_of", "trial_of"]

Changes = Mapping[str, Any]
"""Values by dotted path that override those of the starting configuration."""

_MAX_TRIALS = 14
_DOWN = (4.0, 64.0, 1024.0)
"""Factors between successive lower rates, after the first."""


@attrs.frozen(kw_only=True)
class Trial:
    """One simulated run of a workload.

    Attributes:
        changes: Changes of the configuration.
        part: Name of the part of the workload.
        rate: Requests per second.
        values: Values of the objectives by name: seconds, and the share ``goodput``.
        strain: Largest ratio of a value to its limit; up to 1 all objectives are kept.
        attainment: Share of requests that themselves stay below every limit, 0 to 1.
        e2e_mean_s: Mean end-to-end latency of answered requests, seconds.
        num_failed: Number of requests without an answer.
        num_preemptions: Number of preemptions of all engines.
        output_throughput: Output tokens per second.
        is_burst: Whether all requests arrived within a twentieth of the run, so that a larger rate would hardly change it.
        came_s: Arrival of the last request, seconds; for requests that follow others their earliest time.
        num_buckets: Number of buckets that an engine prepares at its start, on a device with static shapes.
    """

    changes: Changes
    part: str
    rate: float
    values: Mapping[str, float]
    strain: float
    attainment: float
    e2e_mean_s: float
    num_failed: int
    num_preemptions: int
    output_throughput: float
    is_burst: bool
    came_s: float
    num_buckets: int = 0

    @property
    def keeps(self) -> bool:
        """Whether every objective is kept."""
        return self.strain <= 1

    @property
    def is_idle(self) -> bool:
        """Whether fewer than 0.01 requests are in the system on average (Little's law): a smaller rate changes nothing."""
        return self.rate * self.e2e_mean_s < 0.01

    @property
    def spans(self) -> float:
        """Duration of the arrivals divided by the mean latency of a request."""
        return self.came_s / self.e2e_mean_s if self.e2e_mean_s else math.inf

    @property
    def score(self) -> tuple[float, float, float]:
        """Sort key of trials at one rate, the best first: strain, failed requests, latency."""
        return (self.strain, self.num_failed, self.e2e_mean_s)


def trial_of(run: Run, slo: Slo, *, changes: Changes, part: str, rate: float) -> Trial:
    """Return the trial of a run. Pure."""
    answered = [record for record in run.records if not record.error]
    came_s = max(record.request.arrival_s for record in run.records)
    return Trial(
        changes=dict(changes),
        part=part,
        rate=rate,
        values=slo.values(run),
        strain=slo.strain(run),
        attainment=slo.attainment(run),
        e2e_mean_s=sum(one.e2e_s for one in answered) / len(answered) if answered else math.inf,
        num_failed=len(run.records) - len(answered),
        num_preemptions=run.num_preemptions,
        output_throughput=sum(one.num_output_tokens for one in answered) / run.duration_s if run.duration_s else 0.0,
        is_burst=came_s <= run.duration_s / 20,
        came_s=came_s,
        num_buckets=run.num_buckets,
    )


class Trials:
    """Runs the simulator and caches trials.

    Args:
        start: Starting configuration.
        slo: Service-level objectives.
        step_times: Step times, the same for all candidates.
        parts: Parts of the workload, with distinct names.
        replicas: Number of simulated engines.
        assumed: Returns simulated values, such as the number of KV blocks, for settings that the configuration with given changes
            leaves open.
        note: Called with the number of simulations so far.
        drafts: Acceptance of drafts by name of the speculator; None: unknown.
    """

    def __init__(
        self,
        start: Candidate,
        slo: Slo,
        step_times: StepTimes,
        parts: Sequence[Workload],
        *,
        replicas: int = 1,
        assumed: Callable[[Changes], Changes] = lambda _: {},
        note: Callable[[int], None] = lambda _: None,
        drafts: Mapping[str, DraftFacts] | None = None,
    ) -> None:
        self._start, self._slo, self._step_times, self._replicas = start, slo, step_times, replicas
        self._parts = {part.name: part for part in parts}
        self._assumed = assumed
        self._note, self._drafts = note, drafts
        self._candidates: dict[tuple[Any, ...], Candidate | None] = {}
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self.refused: list[tuple[dict[str, Any], str]] = []
        """Changes with which no engine can be built, each with the reason."""

    @property
    def num_run(self) -> int:
        """Number of simulations so far."""
        return len(self.trials)

    def run(self, changes: Changes, part: str, rate: float) -> Trial | None:
        """Return the trial of a part at a rate; None if no engine can be built with these changes.

        Args:
            changes: Changes of the starting configuration.
            part: Name of the part.
            rate: Requests per second.

        Raises:
            TrencadisError: The starting configuration itself cannot be used.
        """
        key = (_key(changes), part, rate)
        if key in self.trials:
            return self.trials[key]
        candidate = self._candidate(changes)
        if candidate is None:
            return None
        workload = at_rate(self._parts[part], rate)
        try:
            found = simulate(
                candidate.config,
                candidate.registry,
                workload,
                step_times=self._step_times,
                replicas=self._replicas,
                drafts=self._drafts,
                token_times=self._slo.needs_token_times,
            )
        except (ConfigError, PluginError, StepFailedError) as error:
            self._refuse(changes, error)
            return None
        trial = trial_of(found, self._slo, changes=changes, part=part, rate=rate)
        self.trials[key] = trial
        self._note(self.num_run)
        return trial

    def _candidate(self, changes: Changes) -> Candidate | None:
        key = _key(changes)
        if key not in self._candidates:
            try:
                self._candidates[key] = self.configured(changes, assumed=self._assumed(changes))
            except (ConfigError, PluginError) as error:
                self._refuse(changes, error)
        return self._candidates[key]

    def configured(self, changes: Changes, *, assumed: Changes | None = None) -> Candidate:
        """Return the starting configuration with changes applied.

        Raises:
            ConfigError: A value cannot be used.
            PluginError: No plugin offers a component of that name.
        """
        start = self._start
        return restored(start.name, {**(assumed or {}), **start.given, **changes}, may_import=start.may_import)

    def _refuse(self, changes: Changes, error: TrencadisError) -> None:
        if not changes:
            raise error
        self._candidates[_key(changes)] = None
        self.refused.append((dict(changes), str(error)))


def _key(changes: Changes) -> tuple[Any, ...]:
    return tuple(sorted((path, repr(value)) for path, value in changes.items()))


@attrs.frozen(kw_only=True)
class Capacity:
    """The largest rate at which a configuration keeps the objectives.

    Attributes:
        changes: Changes of the starting configuration.
        within: Trial at the largest rate that keeps the objectives; None: no rate does.
        beyond: Trial at the smallest rate that misses them; None: every tried rate keeps them.
    """

    changes: Changes
    within: Trial | None
    beyond: Trial | None

    @property
    def rate(self) -> float:
        """Largest rate that keeps the objectives, requests per second; 0: none."""
        return self.within.rate if self.within else 0.0

    @property
    def bound(self) -> float:
        """The capacity's rate; infinite if every tried rate keeps the objectives."""
        return self.rate if self.beyond else math.inf

    @property
    def nearest(self) -> Trial:
        """Trial at the capacity, else the one closest to the objectives."""
        found = self.within or self.beyond
        assert found is not None, "a capacity stands on a trial"
        return found

    @property
    def edge(self) -> Trial:
        """Trial beyond the capacity, else at the largest tried rate, where a better configuration shows."""
        found = self.beyond or self.within
        assert found is not None, "a capacity stands on a trial"
        return found


def capacity_of(
    trials: Trials, changes: Changes, part: str, *, hint: float, factor: float = 2.0, tolerance: float = 0.05
) -> Capacity | None:
    """Return the capacity by bisection over the rate; None if no engine can be built with these changes.

    Arrivals are stretched without new draws (common random numbers), so that trials differ in the rate only.

    Args:
        trials: Runs the simulations.
        changes: Changes of the starting configuration.
        part: Name of the part of the workload.
        hint: Rate to begin with, requests per second.
        factor: Ratio of successive rates until the capacity lies between two, above 1.
        tolerance: Largest final ratio of the two rates, minus 1.
    """
    within: Trial | None = None
    beyond: Trial | None = None
    rate = hint
    down = iter((factor, *_DOWN))
    for number in range(_MAX_TRIALS):
        trial = trials.run(changes, part, _rounded(rate))
        if trial is None:
            return None
        within, beyond = (trial, beyond) if trial.keeps else (within, trial)
        step = factor if number < 2 else max(2.0, factor)
        if not trial.keeps:
            step = 1 / next(down, math.inf)
        if (within and beyond) or not step or (trial.is_burst if trial.keeps else trial.is_idle):
            break
        rate *= step
    while within and beyond and beyond.rate > within.rate * (1 + tolerance):
        rate = _rounded(math.sqrt(within.rate * beyond.rate))
        if rate in (within.rate, beyond.rate):
            break
        trial = trials.run(changes, part, rate)
        assert trial is not None, "it ran at another rate"
        within, beyond = (trial, beyond) if trial.keeps else (within, trial)
    return Capacity(changes=dict(changes), within=within, beyond=beyond)


def _rounded(rate: float) -> float:
    """Return a rate with four digits, for tables and files. Pure."""
    return float(f"{rate:.4g}")
