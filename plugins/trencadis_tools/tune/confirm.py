"""Measurements of configurations on real engines, in alternating order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.experiment import at_rate
from trencadis_tools.compare.live import LiveRuns
from trencadis_tools.simulation import Run
from trencadis_tools.tune.slo import Slo
from trencadis_tools.tune.trials import Trial, trial_of
from trencadis_tools.workloads import Workload

__all__ = ["Measured", "measure"]

_NUM_TURNS = 2
_MOST_S = 30.0
"""Maximum duration of the arrivals of one run, seconds; the workload is cut to it."""


@attrs.frozen(kw_only=True)
class Measured:
    """Measurement of one configuration.

    Attributes:
        name: Name of the configuration: ``start``, ``best`` or ``second``.
        rate: Requests per second.
        num_requests: Number of requests of one run.
        values: Values of the objectives by name, the mean over the runs.
        runs: Trial of each run.
    """

    name: str
    rate: float
    num_requests: int
    values: Mapping[str, float]
    runs: Sequence[Trial]

    @property
    def num_kept(self) -> int:
        """Number of runs that keep the objectives."""
        return sum(run.keeps for run in self.runs)

    @property
    def attainment(self) -> float:
        """Mean share of requests that themselves stay below every limit, 0 to 1."""
        return sum(run.attainment for run in self.runs) / len(self.runs)


def measure(candidates: Sequence[Candidate], workload: Workload, slo: Slo, *, rate: float) -> list[Measured]:
    """Run a workload on an engine of each configuration, first in the given order, then in reverse.

    Args:
        candidates: Configurations with distinct names.
        workload: Workload, cut to the requests that arrive within 30 seconds, at least 40.
        slo: Service-level objectives.
        rate: Requests per second.

    Raises:
        TrencadisError: An engine cannot be built, or a policy failed.
    """
    number = max(40, int(rate * _MOST_S))
    part = at_rate(attrs.evolve(workload, requests=workload.requests[:number]), rate)
    with LiveRuns(token_times=slo.needs_token_times) as live:
        runs: list[list[Run]] = [live(candidates, part, turn) for turn in range(_NUM_TURNS)]
    found = []
    for candidate, own in zip(candidates, zip(*runs, strict=True), strict=True):
        trials = [trial_of(run, slo, changes={}, part=workload.name, rate=rate) for run in own]
        values = {name: sum(one.values[name] for one in trials) / len(trials) for name in trials[0].values}
        found.append(
            Measured(name=candidate.name, rate=rate, num_requests=len(part.requests), values=values, runs=trials)
        )
    return found
