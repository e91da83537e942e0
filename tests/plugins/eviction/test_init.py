from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.eviction import INTERFACE_VERSION
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_plugins.eviction.lru import Lru


def test_hook_yields_lru_and_its_factory_makes_one():
    (component,) = trencadis_eviction_policies()
    assert (component.name, component.interface_version) == ("lru", INTERFACE_VERSION)
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    first, second = (component.factory(component.config(), context) for _ in range(2))
    assert isinstance(first, Lru)
    assert first is not second
