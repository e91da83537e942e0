"""One replica after the other."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import ReplicaViews, Router, RoutingRequest

__all__ = ["RoundRobin"]


class RoundRobin(Router):
    """The next healthy replica after the one that was chosen last."""

    def __init__(self) -> None:
        self._next = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the next one."""
        healthy = np.flatnonzero(replicas.is_healthy)
        return int(healthy[np.searchsorted(healthy, self._next) % len(healthy)])

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the next one, and go on."""
        chosen = self.peek(request, replicas)
        self._next = chosen + 1
        return chosen
