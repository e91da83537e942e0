"""Worker sides in processes of ranks: the suite, for the built-in connectors that work so."""

from __future__ import annotations

import pytest

from trencadis.interfaces import ComponentContext
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.kv_option import NamedConnector
from trencadis_testing.kv_ranks import KVRanksConformance


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
