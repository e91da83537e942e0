"""The suites that every KV connector passes, against the built-in ones; or, with ``--kv-connector=NAME``, against that one."""

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
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_fault_cases import KVFaultConformance
from trencadis_testing.kv_option import NamedConnector
from trencadis_testing.kv_ranks import KVRanksConformance

TARGETS = ("host_offload", "filesystem", "redis")


class TestContract(NamedConnector, KVConnectorConformance):
    targets = TARGETS


class TestFaults(NamedConnector, KVFaultConformance):
    targets = TARGETS


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


class TestStores(NamedConnector, KVRanksConformance):
    targets = ("filesystem", "redis")


class TestHostMemory(NamedConnector, KVRanksConformance):
    targets = ("host_offload",)
    outlives_ranks = False


class TestHostMemoryBeforeADirectory(KVRanksConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path / "blocks"

    def make(self):
        makers = {
            ("kv_connector", "host_offload"): lambda: make_host_offload(HostOffloadConfig(), context),
            ("kv_connector", "filesystem"): lambda: make_filesystem(FilesystemConfig(path=str(self.path)), context),
            ("eviction", "lru"): Lru,
            ("kv_policy", ""): KVPolicy,
            ("kv_codec", ""): IdentityCodec,
        }
        context = ComponentContext(clock=self.clock, seed=0, make=lambda noun, name: makers[noun, name]())
        return make_tiered(TieredConfig(), context)
