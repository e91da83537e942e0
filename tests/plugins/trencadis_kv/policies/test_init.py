from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.policies import trencadis_kv_policies

COMPONENTS = {component.name: component for component in trencadis_kv_policies()}


def test_there_are_two_policies():
    assert set(COMPONENTS) == {"cost_aware", "always"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_factory_makes_a_policy_named_as_the_component(name):
    component = COMPONENTS[name]
    made = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    assert isinstance(made, KVPolicy)
    assert type(made).__name__ == name.title().replace("_", "")
    assert component.summary
