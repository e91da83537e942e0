"""Control requests and metrics of several replicas: asked of all, answered together, and repeated to one that joins again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trencadis.errors import InvalidRequestError, TrencadisError
from trencadis.faults import shown
from trencadis.records import Request
from trencadis_remote.replicas.answers import Gathering, Pages, gather_answers
from trencadis_remote.replicas.pages import replicas_page
from trencadis_remote.replicas.remote_replica import LiveWork, RemoteReplica
from trencadis_remote.replicas.replica_set import ReplicaSet
from trencadis_remote.replicas.routing import Routing

__all__ = ["ReplicaControl"]

logger = logging.getLogger("trencadis")


class ReplicaControl:
    """Asks replicas, and answers for all of them.

    Args:
        replicas: Set of the replicas.
        routing: Routing of the set.
        on_drain: Function that is called when a replica drains.
    """

    def __init__(
        self, replicas: ReplicaSet[LiveWork, RemoteReplica], routing: Routing, *, on_drain: Callable[[], None]
    ) -> None:
        self._set = replicas
        self._routing = routing
        self._on_drain = on_drain
        self._gatherings: list[Gathering] = []
        self._pages = Pages()
        self._changes: list[tuple[str, Mapping[str, Any]]] = []
        self._num_restarts = [0] * len(replicas.seats)

    def lost(self, index: int) -> None:
        """Wait no more for a replica that has ended."""
        self._pages.drop(index)
        for gathering in list(self._gatherings):
            gathering.done(index)

    def rejoined(self, index: int, replica: RemoteReplica) -> None:
        """Repeat the changes that were made before to a replica that was started again."""
        self._num_restarts[index] += 1
        for name, arguments in self._changes:
            refused = functools.partial(_log_refusal, index)
            replica.use(lambda client, a=name, b=arguments, c=refused: client.control(a, b, c))  # type: ignore[misc]

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Request the metrics of all replicas; samples are labelled with the replica's number."""
        live = {seat.index: replica for seat, replica in self._set.live if self._pages.begin(seat.index)}
        gathering = self._gather(set(live), lambda: callback(self._pages.merged(self._own_page())))

        def put(index: int, page: str) -> None:
            self._pages.put(index, page)
            gathering.done(index)

        for index, replica in live.items():
            answer = functools.partial(put, index)
            replica.use(lambda client, answer=answer: client.request_metrics(answer))  # type: ignore[misc]

    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Send a control request to all replicas, and answer with what they say together.

        Some are answered here: ``replicas``, the state of each; ``restart_replica``, which starts ``replica`` again when its requests
        have ended, while others take the new ones; ``route``, which replica would take ``prompt_token_ids`` now.
        """
        answered_here: dict[str, Callable[..., dict[str, Any]]] = {
            "replicas": self._table,
            "restart_replica": self._restart,
            "route": self._route,
        }
        own = answered_here.get(name)
        if own is not None:
            try:
                callback(own(**arguments))
            except TrencadisError as error:
                callback(error)
            return
        answers: dict[int, dict[str, Any] | TrencadisError] = {}
        live = {seat.index: replica for seat, replica in self._set.live if not replica.stalled}
        gathering = self._gather(set(live), lambda: callback(self._answered(name, arguments, answers)))

        def put(index: int, answer: dict[str, Any] | TrencadisError) -> None:
            answers[index] = answer
            gathering.done(index)

        for index, replica in live.items():
            told = functools.partial(put, index)
            replica.use(lambda client, told=told: client.control(name, arguments, told))  # type: ignore[misc]

    def _gather(self, asked: set[int], finish: Callable[[], None]) -> Gathering:
        self._gatherings = [one for one in self._gatherings if not one.is_done]
        gathering = Gathering(asked, finish)
        self._gatherings.append(gathering)
        return gathering

    def _answered(
        self, name: str, arguments: Mapping[str, Any], answers: Mapping[int, dict[str, Any] | TrencadisError]
    ) -> dict[str, Any] | TrencadisError:
        answer = gather_answers(name, answers)
        if isinstance(answer, dict) and name in ("set_scheduling", "set_role"):
            # Of roles the last one counts; changes of scheduling build on each other.
            kept = self._changes if name == "set_scheduling" else [one for one in self._changes if one[0] != name]
            self._changes = [*kept, (name, dict(arguments))]
        return answer

    def _table(self) -> dict[str, Any]:
        loads = self._routing.describe()
        rows = [
            {
                "replica": one.index,
                "state": one.state,
                "num_live": len(one.work),
                "num_placed": one.num_placed,
                "num_moved": one.num_lost,
                "num_rebalanced": one.num_moved,
                "num_restarts": self._num_restarts[one.index],
                "reason": one.reason,
                **loads[one.index],
            }
            for one in self._set.seats
        ]
        return {"router": self._routing.label, "replicas": rows}

    def _restart(self, *, replica: Any) -> dict[str, Any]:
        seats = self._set.seats
        if type(replica) is not int or not 0 <= replica < len(seats):
            raise InvalidRequestError(
                f"there is no replica {shown(replica)}; there are 0 to {len(seats) - 1}.", field="replica"
            )
        found = seats[replica]
        if found.engine is None:
            raise InvalidRequestError(f"replica {replica} is down: {found.reason}", field="replica")
        if not [one for one in seats if one.state == "ready" and one is not found]:
            raise InvalidRequestError(
                f"replica {replica} is the only one that serves.",
                hint="Restart it when another one does.",
                field="replica",
            )
        self._set.drain(replica)
        self._on_drain()
        return self._table()

    def _route(
        self, *, prompt_token_ids: Iterable[int], cache_salt: str | None = None, tenant: str = ""
    ) -> dict[str, Any]:
        request = Request(
            request_id="route",
            prompt_token_ids=tuple(prompt_token_ids),
            tenant=tenant,
            cache_salt=tenant if cache_salt is None else cache_salt,
        )
        if not request.prompt_token_ids:
            raise InvalidRequestError("an empty prompt goes to no replica.", hint="Give at least one token.")
        return self._routing.peek(self._routing.facts(request))

    def _own_page(self) -> str:
        mover = self._set.mover
        return replicas_page(
            self._table()["replicas"],
            num_quarantined=self._routing.num_quarantined,
            num_refused_moves=0 if mover is None else mover.num_refused,
        )


def _log_refusal(index: int, answer: dict[str, Any] | TrencadisError) -> None:
    if isinstance(answer, TrencadisError):
        logger.error("Replica %d, which was started again, refuses a change that was made before: %s", index, answer)
