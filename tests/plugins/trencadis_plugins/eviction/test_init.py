from __future__ import annotations

import sys

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import Component, ComponentContext, EvictionPolicy
from trencadis.interfaces.eviction import INTERFACE_VERSION
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_plugins.eviction.config import LfuConfig
from trencadis_plugins.eviction.lfu import Lfu

COMPONENTS = {component.name: component for component in trencadis_eviction_policies()}
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


def test_hook_yields_every_policy_for_the_present_interface() -> None:
    assert set(COMPONENTS) == {"lru", "lfu", "cost_aware", "ttl"}
    assert {component.interface_version for component in COMPONENTS.values()} == {INTERFACE_VERSION}


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=COMPONENTS.keys())
def test_factory_makes_a_new_policy_of_the_named_file(component: Component) -> None:
    first, second = (component.factory(component.config(), CONTEXT) for _ in range(2))
    assert isinstance(first, EvictionPolicy)
    assert first is not second
    assert type(first).__module__ == f"trencadis_plugins.eviction.{component.name}"


def test_factory_hands_the_options_on() -> None:
    config = LfuConfig(half_life_s=7.0)
    made = COMPONENTS["lfu"].factory(config, CONTEXT)
    assert isinstance(made, Lfu)
    assert made._config is config


def test_registering_imports_no_policy() -> None:
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "trencadis_plugins.eviction.lfu"}
    try:
        list(trencadis_eviction_policies())
        assert "trencadis_plugins.eviction.lfu" not in sys.modules
    finally:
        sys.modules.update(saved)
