"""Loads of replicas, as several routers compare them."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import ReplicaViews
from trencadis.records import FloatArray

__all__ = ["is_imbalanced", "least", "loads"]

_WAITING_WEIGHT = 6.0
_FREE_USAGE = 0.5


def loads(replicas: ReplicaViews) -> FloatArray:
    """Return a load of each replica, in requests, float64 ``[num_replicas]``. Pure.

    Requests; those that wait weigh more the fuller the KV cache is beyond a half, up to four times as much.

    Source: vLLM 0.33, ``DPLBAsyncMPClient``: ``max(own in flight, waiting + running) + 6 · waiting · max(0, kv usage − 0.5)``.
    """
    reported = replicas.num_waiting + replicas.num_running
    pressure = np.maximum(replicas.kv_usage - _FREE_USAGE, 0.0)
    total: FloatArray = np.maximum(replicas.num_live, reported) + _WAITING_WEIGHT * replicas.num_waiting * pressure
    return total


def least(load: FloatArray, replicas: ReplicaViews, *, first: int = 0) -> int:
    """Return the healthy replica with the least load; of equals the first one from ``first`` on, in a circle. Pure."""
    masked = np.where(replicas.is_healthy, load, np.inf)
    equal = np.flatnonzero(masked == masked.min())
    return int(equal[np.searchsorted(equal, first) % len(equal)])


def is_imbalanced(load: FloatArray, replicas: ReplicaViews, *, absolute: float, relative: float) -> bool:
    """Return whether the loads of healthy replicas differ too much for prefixes to count. Pure.

    Args:
        load: Load of all replicas.
        replicas: Says which are healthy.
        absolute: They may differ by this.
        relative: Or by this factor.

    Source: sgl-model-gateway, ``cache_aware.rs``: ``max − min > abs`` and ``max > rel · min``.
    """
    healthy = load[replicas.is_healthy]
    low, high = float(healthy.min()), float(healthy.max())
    return high - low > absolute and high > relative * low
