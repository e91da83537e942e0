from __future__ import annotations

import subprocess
import sys

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.interfaces.kv_connector import INTERFACE_VERSION
from trencadis_kv.connectors import trencadis_kv_connectors
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_plugins.eviction.lru import Lru

COMPONENTS = {component.name: component for component in trencadis_kv_connectors()}


def test_hook_yields_every_connector_for_the_present_interface():
    assert set(COMPONENTS) == {
        "blend",
        "filesystem",
        "host_offload",
        "lmcache",
        "mooncake",
        "nixl",
        "p2p",
        "redis",
        "tiered",
    }
    assert {component.interface_version for component in COMPONENTS.values()} == {INTERFACE_VERSION}


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_setting_says_what_it_means(name):
    for field in attrs.fields(COMPONENTS[name].config):
        assert field.metadata["help"], field.name


def test_factory_makes_a_new_connector_each_time(tmp_path):
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    pairs = [COMPONENTS["filesystem"].factory(FilesystemConfig(path=str(tmp_path)), context) for _ in range(2)]
    assert all(isinstance(pair, ConnectorPair) for pair in pairs)
    assert pairs[0].worker is not pairs[1].worker


def test_connector_that_names_another_component_has_it_made_by_the_engine():
    asked = []

    def make(noun, name):
        asked.append((noun, name))
        return Lru() if noun == "eviction" else ComponentContext(clock=SimulatedClock(), seed=0).make(noun, name)

    component = COMPONENTS["host_offload"]
    component.factory(component.config(eviction="lru"), ComponentContext(clock=SimulatedClock(), seed=0, make=make))
    assert ("eviction", "lru") in asked


def test_registering_imports_no_connector():
    code = (
        "import sys; from trencadis_kv.connectors import trencadis_kv_connectors; list(trencadis_kv_connectors());"
        "print(*[m for m in sys.modules if m.startswith('trencadis_kv.connectors.') and m.endswith('.connector')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
