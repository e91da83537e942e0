"""Guard of a router: its answers are healthy replicas, and the least loaded replica is chosen where no component can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from trencadis.engine.guard import Guarded
from trencadis.faults import CallMeter, Fallback
from trencadis.interfaces import LiveRequests, Move, ReplicaViews, Router, RoutingRequest, SupportsMoves

__all__ = ["GuardedRouter", "LeastLive"]


class LeastLive(Router):
    """The healthy replica with the fewest live requests, the first of equals: what is left when routers fail."""

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return it."""
        load = np.where(replicas.is_healthy, replicas.num_live, np.iinfo(np.int32).max)
        return int(load.argmin())


class GuardedRouter(Guarded[Router]):
    """A router whose answers are healthy replicas. A fallback gets the calls for all replicas, and those for requests that it chose for.

    Args:
        label: See :class:`~trencadis.engine.guard.Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`~trencadis.engine.guard.Guarded`; None: the least loaded replica is chosen.
        meter: See :class:`~trencadis.engine.guard.Guarded`.

    Attributes:
        generation: Changes every time that another router takes over.
    """

    def __init__(
        self,
        label: str,
        strategy: Router,
        make_fallback: Callable[[], Router] | None = None,
        *,
        meter: CallMeter | None = None,
    ) -> None:
        self._least_live: Fallback[Router] = Fallback("the least loaded replica", LeastLive)
        super().__init__(
            Router, label, strategy, make_fallback or self._least_live, meter=meter, capabilities=(SupportsMoves,)
        )
        self._last = None if make_fallback is None else self._least_live
        self.generation = 0
        self._present: set[int] = set()

    @property
    def needs_prefixes(self) -> bool:
        """Whether the router in force is to be given hashes and hits."""
        return bool(self.strategy.needs_prefixes)

    @property
    def moves_period_s(self) -> float:
        """Seconds between two calls of :meth:`moves`; infinity if the router in force moves nothing."""
        router = self.strategy
        return router.moves_period_s if isinstance(router, SupportsMoves) else math.inf

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place and tell it of the replicas."""
        super().quarantine(cause)
        self._make_fallback, self._last = self._last, None
        self._introduce()

    def _put_back(self, label: str, strategy: Router, fallback: Fallback[Router]) -> None:
        super()._put_back(label, strategy, fallback)
        self._last = self._least_live
        self._introduce()

    def _introduce(self) -> None:
        """Tell the router in place of the replicas; requests before it are not its own."""
        self.generation += 1
        present, self._present = self._present, set()
        for replica in sorted(present):
            self.on_replica_added(replica)

    def moves(self, live: LiveRequests, replicas: ReplicaViews) -> Sequence[Move]:
        """Return the moves that the router asks for, legal or not; none if the router in force moves nothing."""
        return cast("SupportsMoves", self.ask).moves(live, replicas)

    def on_moved(self, request: RoutingRequest, replica: int) -> None:
        """Tell a router that supports moves that a request is sent to its new replica."""
        cast("SupportsMoves", self.ask).on_moved(request, replica)

    def on_finished(self, request: RoutingRequest, replica: int, *, generation: int) -> None:
        """Tell the router that a request has ended.

        Args:
            request: The request.
            replica: The replica that had it.
            generation: Generation of the router that selected it: another one knows nothing of the requests before it.
        """
        if generation == self.generation:
            self.ask.on_finished(request, replica)

    def on_replica_added(self, replica: int) -> None:
        """Tell the router of a replica that serves."""
        self.ask.on_replica_added(replica)
        self._present.add(replica)

    def on_replica_removed(self, replica: int) -> None:
        """Tell the router of a replica that has ended."""
        self._present.discard(replica)
        self.ask.on_replica_removed(replica)
