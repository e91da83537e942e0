"""A set of replicas behind a router: which has what, who takes what comes, and where what a replica leaves goes on.

    place ─▶ router ─▶ replica 0 ─┐
                       replica 1 ─┼─ ends, fails or moves its work
                       replica 2 ─┘            │
               ▲                               │
               └────── with the tokens so far ─┘

The engines are live ones in processes of their own (:class:`~trencadis_remote.replicas.remote_replica.RemoteReplica`) or simulated.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import attrs

from trencadis.errors import EngineEndedError, InvalidRequestError, RequestError, TrencadisError
from trencadis.interfaces import RoutingRequest
from trencadis.records import EmbeddingRequest, Request, evolve_unchecked
from trencadis_remote.replicas.mover import LiveRow, Mover
from trencadis_remote.replicas.routing import RoutedEngine, Routing

__all__ = ["ReplicaEngine", "ReplicaSeat", "ReplicaSet", "Work"]

logger = logging.getLogger("trencadis")

_NO_ROUTE = RoutingRequest(token_ids=())


@attrs.define(eq=False)
class Work:
    """A request, or a text to embed, that was sent and has not ended.

    Attributes:
        request: Request of the client.
        routed: Request as the router was shown it.
        generation: Generation of the router that chose the replica.
        replica: Replica that has it; -1: none yet, or none any more.
        tokens: Output so far.
        target: Replica that it is being moved to; -1: it is not.
        stays: Whether it cannot go on elsewhere.
        num_moves: Number of times that the router moved it.
        is_new: Whether no replica has begun it.
    """

    request: Request | EmbeddingRequest
    routed: RoutingRequest = attrs.field(default=_NO_ROUTE, kw_only=True)
    generation: int = attrs.field(default=0, kw_only=True)
    replica: int = attrs.field(default=-1, kw_only=True)
    tokens: list[int] = attrs.field(factory=list, kw_only=True)
    target: int = attrs.field(default=-1, kw_only=True)
    stays: bool = attrs.field(default=False, kw_only=True)
    num_moves: int = attrs.field(default=0, kw_only=True)
    is_new: bool = attrs.field(default=True, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client has received."""
        return len(self.tokens)

    def as_it_is(self) -> Request | EmbeddingRequest:
        """Return the request with the output that it has; one that a replica had is not asked to be admitted again."""
        if self.is_new or isinstance(self.request, EmbeddingRequest):
            return self.request
        return evolve_unchecked(self.request, output_token_ids=tuple(self.tokens))


WorkT = TypeVar("WorkT", bound=Work)
WorkT_contra = TypeVar("WorkT_contra", bound=Work, contravariant=True)


class ReplicaEngine(RoutedEngine, Protocol[WorkT_contra]):
    """An engine that a set sends work to: in a process of its own, or simulated."""

    def send(self, work: WorkT_contra, request: Request | EmbeddingRequest) -> None:
        """Send a request.

        Args:
            work: Work of the set.
            request: Request with the output that it has.

        Raises:
            RequestError: It cannot be served.
            EngineEndedError: The engine has ended.
        """
        ...

    def withdraw(self, work: WorkT_contra) -> None:
        """Ask for a request that is to go on elsewhere; :meth:`ReplicaSet.moved` follows, or :meth:`ReplicaSet.stayed`."""
        ...

    def left(self, work: WorkT_contra) -> None:
        """Note that a request or a text has ended or goes on elsewhere."""
        ...


EngineT = TypeVar("EngineT", bound=ReplicaEngine[Any])


@attrs.define(eq=False)
class ReplicaSeat(Generic[WorkT, EngineT]):
    """The place of one engine.

    Attributes:
        index: Index of the replica.
        engine: Engine of the replica; None: there is none at the moment.
        work: Work of the replica, by request id.
        is_draining: Whether it takes nothing new.
        reason: Reason why its last engine ended.
        num_placed: Number of requests and texts that it was given.
        num_lost: Number of these that were left to others when its engine ended.
        num_moved: Number of these that the router moved to others while it served.
    """

    index: int
    engine: EngineT | None = None
    work: dict[str, WorkT] = attrs.field(factory=dict)
    is_draining: bool = False
    reason: str = ""
    num_placed: int = 0
    num_lost: int = 0
    num_moved: int = 0

    @property
    def state(self) -> str:
        """State of the replica, in a word."""
        if self.engine is None:
            return "down"
        return "stalled" if self.engine.stalled else "draining" if self.is_draining else "ready"


class ReplicaSet(Generic[WorkT, EngineT]):
    """Gives work to replicas, and what they leave to others. Used by one thread at a time.

    Args:
        num_replicas: Number of seats, 0 .. num_replicas - 1; all are empty before :meth:`join`.
        routing: Routing that chooses replicas; None: there is one replica.
        mover: Mover of requests between replicas that serve; None: they stay.
        on_end: Function that is called with the seat and the reason when an engine turns out to have ended while work was sent to it; it calls :meth:`remove`
            and :meth:`lose`.
        on_refusal: Function that is called with work that had a replica and that no other takes, and with the error; it has been forgotten.

    Attributes:
        seats: Seats by index.
        work: Work that has not ended, by request id; in the order in which it was given to its replicas.
        unplaced: Work that has left its replica, or for which none serves.
        failure: Reason why nothing can be placed any more; empty while it can.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        routing: Routing | None,
        mover: Mover | None,
        on_end: Callable[[ReplicaSeat[WorkT, EngineT], str], None],
        on_refusal: Callable[[WorkT, RequestError], None],
    ) -> None:
        self.seats: list[ReplicaSeat[WorkT, EngineT]] = [ReplicaSeat(index) for index in range(num_replicas)]
        self.routing = routing
        self.mover = mover
        self.work: dict[str, WorkT] = {}
        self.unplaced: deque[WorkT] = deque()
        self.failure = ""
        self._on_end = on_end
        self._on_refusal = on_refusal
        self._is_settling = False

    # ---------------------------------------------------------------------------------------------------- replicas

    @property
    def live(self) -> list[tuple[ReplicaSeat[WorkT, EngineT], EngineT]]:
        """The seats that have an engine."""
        return [(seat, seat.engine) for seat in self.seats if seat.engine is not None]

    def join(self, index: int, engine: EngineT) -> None:
        """Let an engine that is ready take work."""
        self.seats[index].engine = engine
        if self.routing is not None:
            self.routing.added(index, engine)

    def drain(self, index: int) -> None:
        """Give an engine nothing new."""
        self.seats[index].is_draining = True
        if self.routing is not None:
            self.routing.draining(index)

    def remove(self, index: int) -> None:
        """Empty a seat; what its engine had is still its own."""
        seat = self.seats[index]
        seat.engine, seat.is_draining = None, False
        if self.routing is not None:
            self.routing.removed(index)

    def lose(self, index: int, continues: Callable[[WorkT], bool] = lambda _: True) -> None:
        """Take the work of an engine that has ended from its seat; :meth:`settle` gives it to others.

        Args:
            index: Index of the seat, which is empty.
            continues: Function that is called with each; what does not go on is the caller's to end.
        """
        seat = self.seats[index]
        for work in list(seat.work.values()):
            if continues(work):
                seat.num_lost += 1
                work.target = -1
                self._release(work)

    # -------------------------------------------------------------------------------------------------------- work

    def check(self, request_id: str = "") -> None:
        """Raise unless new work can be placed.

        Args:
            request_id: Id of a new request; empty: there is none.

        Raises:
            EngineEndedError: Everything has ended.
            InvalidRequestError: The id is live.
        """
        if self.failure:
            raise EngineEndedError(self.failure)
        if request_id in self.work:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")

    def place(self, work: WorkT) -> None:
        """Give work to the replica that it moves to or that the router chooses, to another if that has ended; it waits if there is none.

        Raises:
            RequestError: It cannot be served.
            EngineEndedError: No replica is left, and none will be.
        """
        request, request_id = work.as_it_is(), work.request.request_id
        if self.routing is not None:
            work.routed = self.routing.facts(request)
        while True:
            self.check()
            if not self.live:
                self.work[request_id] = work
                self.unplaced.append(work)
                return
            seat = self.seats[self._chosen(work)]
            try:
                if seat.engine is None:
                    raise EngineEndedError(seat.reason)
                seat.engine.send(work, request)
            except TrencadisError as error:
                self._withdrawn(work, seat.index)
                if not isinstance(error, EngineEndedError):
                    raise
                self._on_end(seat, str(error))
            else:
                break
        work.replica, work.is_new = seat.index, False
        seat.num_placed += 1
        self.work.pop(request_id, None)
        self.work[request_id] = seat.work[request_id] = work  # the newest

    def settle(self) -> None:
        """Give what has no replica to those that there are, which may end meanwhile."""
        if self._is_settling:
            return
        self._is_settling = True
        try:
            while self.unplaced and self.live and not self.failure:
                work = self.unplaced.popleft()
                try:
                    self.place(work)
                except RequestError as error:
                    self.forget(work)
                    self._on_refusal(work, error)
                except EngineEndedError:
                    break  # all replicas have ended
        finally:
            self._is_settling = False

    def forget(self, work: WorkT) -> None:
        """Take work that has ended out of everything."""
        if work.replica >= 0:
            self._leave(work)
        del self.work[work.request.request_id]

    def move(self) -> None:
        """Withdraw the requests that the router moves: the new replica gets each when the old one has said its last token."""
        assert self.mover is not None, "there is one that moves"
        live = [one for one in self.work.values() if one.replica >= 0 and isinstance(one.request, Request)]
        rows = [
            LiveRow(one.request, one.replica, one.num_tokens, one.num_moves, one.target, one.stays)  # type: ignore[arg-type]
            for one in live
        ]
        for move in self.mover.choose(rows):
            work = live[move.request]
            engine = self.seats[work.replica].engine
            if engine is not None:
                work.target = move.replica
                engine.withdraw(work)

    def moved(self, work: WorkT) -> None:
        """Note that a replica has given back a request that is to go on elsewhere; :meth:`settle` sends it there."""
        self.seats[work.replica].num_moved += 1
        work.num_moves += 1
        self._release(work)

    def stayed(self, request_id: str) -> None:
        """Note that a request cannot go on elsewhere."""
        work = self.work.get(request_id)
        if work is not None:
            work.target, work.stays = -1, True

    # ----------------------------------------------------------------------------------------------------- innards

    def _chosen(self, work: WorkT) -> int:
        if self.routing is None:
            return 0
        target, work.target = work.target, -1
        moves = target >= 0 and self.routing.move(work.routed, target)
        chosen = target if moves else self.routing.select(work.routed)
        work.generation = self.routing.generation
        return chosen

    def _release(self, work: WorkT) -> None:
        self._leave(work)
        self.unplaced.append(work)

    def _leave(self, work: WorkT) -> None:
        seat = self.seats[work.replica]
        del seat.work[work.request.request_id]
        if seat.engine is not None:
            seat.engine.left(work)
        self._withdrawn(work, work.replica)
        work.replica = -1

    def _withdrawn(self, work: WorkT, replica: int) -> None:
        if self.routing is not None:
            self.routing.withdrawn(work.routed, replica, generation=work.generation)
