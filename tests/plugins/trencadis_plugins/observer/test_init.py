from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.observer import INTERFACE_VERSION
from trencadis_plugins.observer import trencadis_observers
from trencadis_plugins.observer.config import LogObserverConfig
from trencadis_plugins.observer.log import LogObserver
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_plugins.observer.recorder import RecorderObserver

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


def test_hook_yields_the_built_in_observers():
    components = {component.name: component for component in trencadis_observers()}
    assert list(components) == ["log", "prometheus", "recorder"]
    assert {component.interface_version for component in components.values()} == {INTERFACE_VERSION}
    assert components["log"].config is LogObserverConfig


def test_factories_make_observers_of_their_own_name():
    components = {component.name: component for component in trencadis_observers()}
    made = {name: component.factory(component.config(), CONTEXT) for name, component in components.items()}
    assert {name: type(observer) for name, observer in made.items()} == {
        "log": LogObserver,
        "prometheus": PrometheusObserver,
        "recorder": RecorderObserver,
    }
