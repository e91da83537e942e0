"""The less loaded of two replicas."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.router.loads import loads

__all__ = ["PowerOfTwo"]


class PowerOfTwo(Router):
    """Draws two healthy replicas and takes the less loaded one: where many choose at once by old loads, they do not choose the same.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.

    Args:
        seed: Seed of the draws, which depend on it and on the number of requests before.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._num_selected = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return what the next draw gives."""
        healthy = np.flatnonzero(replicas.is_healthy)
        if len(healthy) == 1:
            return int(healthy[0])
        draws = np.random.Generator(np.random.Philox(key=self._seed, counter=self._num_selected))
        first, step = int(draws.integers(len(healthy))), 1 + int(draws.integers(len(healthy) - 1))
        one, other = int(healthy[first]), int(healthy[(first + step) % len(healthy)])
        load = loads(replicas)
        return other if load[other] < load[one] else one

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return what the next draw gives, and go on."""
        chosen = self.peek(request, replicas)
        self._num_selected += 1
        return chosen
