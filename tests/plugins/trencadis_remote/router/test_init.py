from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_remote.router import trencadis_routers

COMPONENTS = {component.name: component for component in trencadis_routers()}


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "power_of_two", "prefix_affinity", "cache_aware"])
def test_a_factory_makes_a_router_named_as_the_component(name: str) -> None:
    component = COMPONENTS[name]
    made = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=3))
    assert type(made).__name__ == name.title().replace("_", "")


def test_there_are_no_others() -> None:
    assert len(COMPONENTS) == 5
