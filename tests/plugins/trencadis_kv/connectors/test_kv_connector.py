"""The suites that every KV connector passes, against the built-in ones; or, with ``--kv-connector=NAME``, against that one."""

from __future__ import annotations

from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_fault_cases import KVFaultConformance
from trencadis_testing.kv_option import NamedConnector

TARGETS = ("host_offload", "filesystem", "redis")


class TestContract(NamedConnector, KVConnectorConformance):
    targets = TARGETS


class TestFaults(NamedConnector, KVFaultConformance):
    targets = TARGETS
