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
    from trencadis_testing.backend import BackendConformance
    from trencadis_testing.bucketing import BucketingConformance
    from trencadis_testing.eviction import EvictionConformance
    from trencadis_testing.fakes import FakeBackend
    from trencadis_testing.observer import ObserverConformance
    from trencadis_testing.sampling import SamplingConformance
    from trencadis_testing.scheduling import SchedulingConformance

__all__ = [
    "BackendConformance",
    "BucketingConformance",
    "EvictionConformance",
    "FakeBackend",
    "ObserverConformance",
    "SamplingConformance",
    "SchedulingConformance",
]

_HOMES = {
    "BackendConformance": "trencadis_testing.backend",
    "BucketingConformance": "trencadis_testing.bucketing",
    "EvictionConformance": "trencadis_testing.eviction",
    "FakeBackend": "trencadis_testing.fakes",
    "ObserverConformance": "trencadis_testing.observer",
    "SamplingConformance": "trencadis_testing.sampling",
    "SchedulingConformance": "trencadis_testing.scheduling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trencadis_testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
