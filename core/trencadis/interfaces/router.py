"""Contract of the noun ``router``: which replica takes a request, and which requests move to another one.

Replicas are engines with the same model and configuration, each with a KV cache of its own. Text never depends on the answer: a wrong
one costs time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, law, tell
from trencadis.records import BoolArray, FloatArray, Int32Array, Int64Array

__all__ = [
    "INTERFACE_VERSION",
    "STABILITY",
    "LiveRequests",
    "Move",
    "ReplicaViews",
    "Router",
    "RoutingRequest",
    "SupportsMoves",
]

INTERFACE_VERSION = 1
STABILITY = "provisional"


@attrs.frozen(kw_only=True)
class RoutingRequest:
    """A request, or a text to embed, that needs a replica. Read-only.

    Attributes:
        token_ids: Tokens of the prompt, and of output that another replica began; at least 1.
        block_hashes: Hashes of its full blocks without the last token, head first, as the engines' prefix caches hash them, cut to 8 bytes;
            the cache salt is part of them. Empty unless ``Router.needs_prefixes``, without prefix caching, and for a text
            to embed.
        tenant: Who asks: the part before the first slash, as in ``[scheduling.tenants]``.
        user: Who asks, the whole name.
    """

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...] = ()
    tenant: str = ""
    user: str = ""


@attrs.frozen(kw_only=True)
class ReplicaViews:
    """All replicas. Read-only; arrays are parallel, hold what is known at the moment of the call, and keep their length.

    Attributes:
        num_live: Requests and texts that were sent to each and have not ended, int32 ``[num_replicas]``; exact.
        num_waiting: Number of these that wait, as the replica said last, some milliseconds ago, int32 ``[num_replicas]``.
        num_running: The same, those that run, int32 ``[num_replicas]``.
        kv_usage: The same, share of its KV blocks that sequences hold, 0 .. 1, float64 ``[num_replicas]``.
        hit_blocks: Leading blocks of this request that each has in its prefix cache, or that a live request of its computes, int32
            ``[num_replicas]``; 0 where ``RoutingRequest.block_hashes`` is empty.
        is_healthy: May be chosen: it serves, makes progress, and is not being drained; bool ``[num_replicas]``, at least one is.
    """

    num_live: Int32Array
    num_waiting: Int32Array
    num_running: Int32Array
    kv_usage: FloatArray
    hit_blocks: Int32Array
    is_healthy: BoolArray


def _healthy(method: str, answer: Any, is_healthy: Any) -> int:
    if _is_index(answer) and 0 <= answer < len(is_healthy) and is_healthy[answer]:
        return int(answer)
    raise ContractError(f"{method}() returned {shown(answer)}, which is no healthy replica of {len(is_healthy)}")


def _moves(method: str, answer: Any) -> Any:
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise ContractError(f"{method}() returned {shown(answer)}, which is no sequence of moves")
    for one in answer:
        if not isinstance(one, tuple) or len(one) != 2 or not all(map(_is_index, one)):
            raise ContractError(
                f"{method}() returned {shown(one)}, which is no move: a request and a replica by their indices"
            )
    return answer


def _is_index(answer: object) -> bool:
    return isinstance(answer, int | np.integer) and not isinstance(answer, bool)


_HEALTHY = Law("the index of a healthy replica", _healthy, ("replicas.is_healthy",))


class Router(ABC):
    """Chooses replicas. One thread, that of the client; a call takes at most 200 µs with 1,000 replicas.

    Answers follow from the calls before: no wall clock, no global random source. An answer that is no healthy replica, an exception,
    and calls over ``[budget] router_ms`` put the fallback in the router's place, and the least loaded replica takes requests without one.

    Attributes:
        needs_prefixes: ``block_hashes`` and ``hit_blocks`` are to be given; they cost some 1 µs for a block of the prompt.
    """

    needs_prefixes: bool = False

    @abstractmethod
    @law(_HEALTHY)
    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the index of a healthy replica: what :meth:`select` would return now. Pure."""

    @law(_HEALTHY, opens=True, calls_others=True)
    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the index of a healthy replica, which takes the request; may remember it. Once per request and try.

        The default: that of :meth:`peek`.
        """
        return self.peek(request, replicas)

    @tell  # noqa: B027 - optional
    def on_finished(self, request: RoutingRequest, replica: int) -> None:
        """Called when a request that :meth:`select` chose a replica for has ended, or has left a replica that ended."""

    @tell  # noqa: B027 - optional
    def on_replica_added(self, replica: int) -> None:
        """Called when a replica has begun to serve, with an empty cache: each at the start, and one that is started again."""

    @tell  # noqa: B027 - optional
    def on_replica_removed(self, replica: int) -> None:
        """Called when a replica has ended; its index stays its own."""


@attrs.frozen(kw_only=True)
class LiveRequests:
    """Requests that replicas have, without texts to embed. Read-only; arrays are parallel, in the order in which requests were sent there.

    Attributes:
        replica: That has each, int32 ``[num_requests]``.
        num_prompt_tokens: Number of prompt tokens of each, int32 ``[num_requests]``.
        num_output_tokens: Number of tokens that the client has received of each, int32 ``[num_requests]``; with 0 a request waits or its
            prompt is being computed; with more it may have been preempted, which is not known here.
        num_moves: Times that :meth:`SupportsMoves.moves` moved it, int32 ``[num_requests]``.
        priority: That it asked for; smaller is served first by policies that look at it. Int64 ``[num_requests]``.
        tenants: Who asked: the part before the first slash, as in ``[scheduling.tenants]``.
        target: Replica that each is on its way to, int32 ``[num_requests]``; -1: it is not moving.
        is_movable: False: it is on its way already, is being ended, was moved ``[router] max_moves`` times, or has to stay, since
            its tokens do not determine how it goes on. Bool ``[num_requests]``.
    """

    replica: Int32Array
    num_prompt_tokens: Int32Array
    num_output_tokens: Int32Array
    num_moves: Int32Array
    target: Int32Array
    priority: Int64Array
    tenants: tuple[str, ...]
    is_movable: BoolArray


class Move(NamedTuple):
    """A request that is to leave its replica.

    Attributes:
        request: Index of the request in :class:`LiveRequests`; it is movable.
        replica: That takes it: a healthy one, and not the one that has it.
    """

    request: int
    replica: int


class SupportsMoves(ABC):
    """Optional for a router: moves requests that wait or run to other replicas. The client looks for it once, when it is made.

    A move ends the request at its replica after the step that runs there, and sends it on with the tokens that came, as after a failure:
    the text is the same. Its KV is computed again, unless the prefix cache or the KV connector of the other replica has it.

    What is no legal move is refused and counted, as are moves beyond ``[router] max_moves_per_s``; an exception, an answer that is no
    sequence of moves, and calls over ``[budget] router_ms`` put the fallback in the router's place.

    Attributes:
        moves_period_s: Seconds between two calls of :meth:`moves`, positive. The client calls it with the first message of a replica after
            that time; while no replica has anything to say, nothing moves.
    """

    moves_period_s: float = 0.1

    @abstractmethod
    @law(Law("a sequence of moves", _moves), otherwise=())
    def moves(self, live: LiveRequests, replicas: ReplicaViews) -> Sequence[Move]:
        """Return which requests are to move now, each at most once; the first ones count where there are too many. Pure.

        At most 10 ms with 1,000 replicas and 20,000 requests.

        Args:
            live: At least one request.
            replicas: Replicas; see :meth:`Router.select`; ``hit_blocks`` is 0.
        """

    @tell  # noqa: B027 - optional
    def on_moved(self, request: RoutingRequest, replica: int) -> None:
        """Called when a request that was to move is sent to its new replica.

        :meth:`Router.on_finished` was called for the replica that it left, and will be for this one.

        Args:
            request: With the tokens that came.
            replica: That takes it.
        """
