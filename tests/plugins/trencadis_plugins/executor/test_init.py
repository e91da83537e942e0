from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.executor import INTERFACE_VERSION
from trencadis_plugins.executor import trencadis_executors
from trencadis_plugins.executor.inline import InlineExecutor


def test_hook_yields_the_executor_inline():
    (component,) = trencadis_executors()
    assert (component.name, component.interface_version) == ("inline", INTERFACE_VERSION)
    executor = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    assert isinstance(executor, InlineExecutor)
    executor.close()
