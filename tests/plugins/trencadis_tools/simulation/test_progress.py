"""How far a simulation is."""

from __future__ import annotations

from trencadis.api import load_with_plugins
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import load_workload


def test_requests_that_have_ended_are_counted_up_to_all_of_them() -> None:
    resolved, registry = load_with_plugins(environ={}, overrides={"scheduling.name": "fcfs"})
    workload, told = load_workload("poisson", limit=40), []
    simulate(resolved.config, registry, workload, step_times=LinearStepTimes(), note=told.append)
    assert told == list(range(1, 41))
