"""The test kit for plugin authors: conformance suites, fakes and fixtures.

A suite is a class to inherit from; it needs pytest and nothing else::

    class TestFibonacci(BucketingConformance):
        make = Fibonacci

Names are imported on first use: pytest loads this package at start-up, wherever Trencadís is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis_testing.acceptance import AcceptanceConformance
    from trencadis_testing.backend import BackendConformance
    from trencadis_testing.bucketing import BucketingConformance, UnifiedBucketingConformance
    from trencadis_testing.collective import CollectiveConformance
    from trencadis_testing.draft_length import DraftLengthConformance
    from trencadis_testing.eviction import EvictionConformance
    from trencadis_testing.executor import ExecutorConformance
    from trencadis_testing.fakes import FakeBackend
    from trencadis_testing.kv_connector import KVConnectorConformance
    from trencadis_testing.kv_fault_cases import KVFaultConformance
    from trencadis_testing.kv_ranks import KVRanksConformance
    from trencadis_testing.observer import ObserverConformance
    from trencadis_testing.router import RouterConformance
    from trencadis_testing.sampling import SamplingConformance
    from trencadis_testing.sampling_processors import LogitsProcessorConformance
    from trencadis_testing.scheduling import SchedulingConformance
    from trencadis_testing.speculation import SpeculationConformance
    from trencadis_testing.stage import StageConformance

__all__ = [
    "AcceptanceConformance",
    "BackendConformance",
    "BucketingConformance",
    "CollectiveConformance",
    "DraftLengthConformance",
    "EvictionConformance",
    "ExecutorConformance",
    "FakeBackend",
    "KVConnectorConformance",
    "KVFaultConformance",
    "KVRanksConformance",
    "LogitsProcessorConformance",
    "ObserverConformance",
    "RouterConformance",
    "SamplingConformance",
    "SchedulingConformance",
    "SpeculationConformance",
    "StageConformance",
    "UnifiedBucketingConformance",
]

_HOMES = {
    "AcceptanceConformance": "trencadis_testing.acceptance",
    "BackendConformance": "trencadis_testing.backend",
    "BucketingConformance": "trencadis_testing.bucketing",
    "CollectiveConformance": "trencadis_testing.collective",
    "DraftLengthConformance": "trencadis_testing.draft_length",
    "EvictionConformance": "trencadis_testing.eviction",
    "ExecutorConformance": "trencadis_testing.executor",
    "FakeBackend": "trencadis_testing.fakes",
    "KVConnectorConformance": "trencadis_testing.kv_connector",
    "KVFaultConformance": "trencadis_testing.kv_fault_cases",
    "KVRanksConformance": "trencadis_testing.kv_ranks",
    "LogitsProcessorConformance": "trencadis_testing.sampling_processors",
    "ObserverConformance": "trencadis_testing.observer",
    "RouterConformance": "trencadis_testing.router",
    "SamplingConformance": "trencadis_testing.sampling",
    "SchedulingConformance": "trencadis_testing.scheduling",
    "SpeculationConformance": "trencadis_testing.speculation",
    "StageConformance": "trencadis_testing.stage",
    "UnifiedBucketingConformance": "trencadis_testing.bucketing",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trencadis_testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
