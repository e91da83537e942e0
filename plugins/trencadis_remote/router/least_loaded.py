"""The replica that has least to do."""

from __future__ import annotations

from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.router.loads import least, loads

__all__ = ["LeastLoaded"]


class LeastLoaded(Router):
    """The least :func:`~trencadis_remote.router.loads.loads`; equals take turns."""

    def __init__(self) -> None:
        self._next = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the least loaded one."""
        return least(loads(replicas), replicas, first=self._next)

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the least loaded one; among equals the next one has its turn then."""
        chosen = self.peek(request, replicas)
        self._next = chosen + 1
        return chosen
