from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.scheduling import INTERFACE_VERSION
from trencadis_plugins.scheduling import trencadis_scheduling_policies
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.fcfs import Fcfs

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


def test_hook_yields_fcfs():
    components = {component.name: component for component in trencadis_scheduling_policies()}
    assert components["fcfs"].interface_version == INTERFACE_VERSION
    assert components["fcfs"].config is FcfsConfig


def test_factory_of_fcfs_hands_on_the_config():
    components = {component.name: component for component in trencadis_scheduling_policies()}
    policy = components["fcfs"].factory(FcfsConfig(long_prefill_threshold=16), CONTEXT)
    assert isinstance(policy, Fcfs)
    assert policy.chunk(None, slot=0, num_remaining=100, token_budget=64) == 16
