"""Worker sides in processes of ranks: the suite, for the built-in connectors that work so."""

from __future__ import annotations

from trencadis_testing.kv_option import NamedConnector
from trencadis_testing.kv_ranks import KVRanksConformance


class TestStores(NamedConnector, KVRanksConformance):
    targets = ("filesystem", "redis")


class TestHostMemory(NamedConnector, KVRanksConformance):
    targets = ("host_offload",)
    outlives_ranks = False
