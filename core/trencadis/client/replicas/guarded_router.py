"""Guard of a router: its answers are healthy replicas, and the least loaded replica is chosen where no component can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from trencadis.engine.guards import Fallback, Guarded
from trencadis.faults import CallMeter, shown
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
        label: See :class:`~trencadis.engine.guards.Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`~trencadis.engine.guards.Guarded`; None: the least loaded replica is chosen.
        meter: See :class:`~trencadis.engine.guards.Guarded`.

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
        super().__init__(label, strategy, make_fallback or self._least_live, meter=meter)
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

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return what :meth:`select` would return now."""
        return int(self.guarded("peek", lambda router: router.peek(request, replicas), _check("peek", replicas)))

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return a healthy replica, which takes the request."""
        self.try_again()
        return int(self.guarded("select", lambda router: router.select(request, replicas), _check("select", replicas)))

    def moves(self, live: LiveRequests, replicas: ReplicaViews) -> Sequence[Move]:
        """Return the moves that the router asks for, legal or not; none if the router in force moves nothing."""

        def moves(router: Router) -> Sequence[Move]:
            return router.moves(live, replicas) if isinstance(router, SupportsMoves) else ()

        return self.guarded("moves", moves, _check_moves)

    def on_moved(self, request: RoutingRequest, replica: int) -> None:
        """Tell a router that supports moves that a request is sent to its new replica."""

        def tell(router: Router) -> None:
            if isinstance(router, SupportsMoves):
                router.on_moved(request, replica)

        self._tell(tell, "on_moved")

    def on_finished(self, request: RoutingRequest, replica: int, *, generation: int) -> None:
        """Tell the router that a request has ended.

        Args:
            request: Which.
            replica: That had it.
            generation: That of the router that selected it: another one knows nothing of the requests before it.
        """
        if generation == self.generation:
            self._tell(lambda router: router.on_finished(request, replica), "on_finished")

    def on_replica_added(self, replica: int) -> None:
        """Tell the router of a replica that serves."""
        self._tell(lambda router: router.on_replica_added(replica), "on_replica_added")
        self._present.add(replica)

    def on_replica_removed(self, replica: int) -> None:
        """Tell the router of a replica that has ended."""
        self._present.discard(replica)
        self._tell(lambda router: router.on_replica_removed(replica), "on_replica_removed")


def _check_moves(answer: Sequence[Move]) -> str:
    """Return what is wrong with the form of moves; which of them can be made is another matter."""
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        return f"moves() returned {shown(answer)}, which is no sequence of moves"
    for one in answer:
        is_pair = isinstance(one, tuple) and len(one) == 2
        if not is_pair or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in one):
            return f"moves() returned {shown(one)}, which is no move: a request and a replica by their indices"
    return ""


def _check(method: str, replicas: ReplicaViews) -> Callable[[int], str]:
    """Return what says what is wrong with an answer."""

    def check(answer: int) -> str:
        is_whole = isinstance(answer, int | np.integer) and not isinstance(answer, bool)
        if is_whole and 0 <= answer < len(replicas.is_healthy) and replicas.is_healthy[answer]:
            return ""
        return f"{method}() returned {shown(answer)}, which is no healthy replica of {len(replicas.is_healthy)}"

    return check
