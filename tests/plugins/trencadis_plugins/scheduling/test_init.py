from __future__ import annotations

import importlib

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, SchedulingPolicy
from trencadis.interfaces.scheduling import INTERFACE_VERSION
from trencadis_plugins.scheduling import trencadis_scheduling_policies
from trencadis_plugins.scheduling.config import FairShareConfig, FcfsConfig
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.priority import Priority

COMPONENTS = {component.name: component for component in trencadis_scheduling_policies()}
CONTEXT = ComponentContext(
    clock=SimulatedClock(), seed=0, make=lambda noun, name: {"fcfs": Fcfs, "priority": Priority}[name]()
)


def test_hook_yields_the_policies_of_the_manual():
    assert set(COMPONENTS) == {
        "fcfs",
        "prefill_first",
        "priority",
        "shortest_first",
        "fair_share",
        "deadline",
        "prefix_affinity",
    }


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_factory_makes_its_own_policy(name):
    component = COMPONENTS[name]
    policy = component.factory(component.config(), CONTEXT)
    assert isinstance(policy, SchedulingPolicy)
    home = importlib.import_module(f"trencadis_plugins.scheduling.{name}")
    assert type(policy).__module__ == home.__name__
    assert component.interface_version == INTERFACE_VERSION
    assert component.summary.endswith(".")


def test_factory_of_fcfs_hands_on_the_config():
    policy = COMPONENTS["fcfs"].factory(FcfsConfig(long_prefill_threshold=16), CONTEXT)
    assert policy.chunk(None, slot=0, num_remaining=100, token_budget=64) == 16


def test_fair_share_goes_around_the_named_policy():
    policy = COMPONENTS["fair_share"].factory(FairShareConfig(inner="priority"), CONTEXT)
    assert isinstance(policy.inner, Priority)


def test_fair_share_without_an_engine_says_what_is_missing():
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    with pytest.raises(ContractError, match="cannot make the scheduling component 'fcfs'"):
        COMPONENTS["fair_share"].factory(FairShareConfig(), context)
