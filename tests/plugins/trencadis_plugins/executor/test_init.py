from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.executor import INTERFACE_VERSION
from trencadis_plugins.executor import trencadis_executors
from trencadis_plugins.executor.inline import InlineExecutor
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_plugins.executor.ray_cluster import RayExecutor


def test_hook_yields_the_executors():
    built = {}
    for component in trencadis_executors():
        assert component.interface_version == INTERFACE_VERSION
        built[component.name] = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    assert {name: type(executor) for name, executor in built.items()} == {
        "inline": InlineExecutor,
        "processes": ProcessesExecutor,
        "ray": RayExecutor,
    }
    for executor in built.values():
        executor.close()
