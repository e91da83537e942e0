"""What a router is shown: facts of a request, and arrays over replicas that are kept up to date as things happen."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from trencadis.api import BlockHasher
from trencadis.clock import Clock
from trencadis.interfaces import ReplicaViews, RoutingRequest
from trencadis.records import EmbeddingRequest, EngineLoad, Request, read_only
from trencadis_remote.process.messages import HASH_BYTES
from trencadis_remote.replicas.guarded_router import GuardedRouter
from trencadis_remote.replicas.prefix_index import PrefixIndex

__all__ = ["RoutedEngine", "Routing"]

_HEALTH_S = 0.1
_NONE = RoutingRequest(token_ids=())
_cut = itemgetter(slice(HASH_BYTES))


class RoutedEngine(Protocol):
    """An engine that requests are sent to."""

    @property
    def stalled(self) -> str:
        """Why it makes no progress; empty while it does."""
        ...


class Routing:
    """Chooses replicas by a router. Used by the client's thread.

    Args:
        router: Guarded.
        num_replicas: Replicas 0 .. num_replicas - 1; none is there before :meth:`added`.
        clock: Says when to look again whether replicas make progress.
        hasher: Hashes blocks as the replicas do; None: without prefix caching.
    """

    def __init__(
        self, router: GuardedRouter, *, num_replicas: int, clock: Clock, hasher: BlockHasher | None = None
    ) -> None:
        self._router = router
        self._clock = clock
        self._hasher = hasher
        self._index = PrefixIndex(num_replicas)
        self._clients: list[RoutedEngine | None] = [None] * num_replicas
        self._is_draining = np.zeros(num_replicas, np.bool_)
        self._num_live = np.zeros(num_replicas, np.int32)
        self._num_waiting = np.zeros(num_replicas, np.int32)
        self._num_running = np.zeros(num_replicas, np.int32)
        self._kv_usage = np.zeros(num_replicas, np.float64)
        self._hit_blocks = np.zeros(num_replicas, np.int32)
        self._is_healthy = np.zeros(num_replicas, np.bool_)
        self._looked_s = -np.inf
        self._views = ReplicaViews(
            num_live=read_only(self._num_live),
            num_waiting=read_only(self._num_waiting),
            num_running=read_only(self._num_running),
            kv_usage=read_only(self._kv_usage),
            hit_blocks=read_only(self._hit_blocks),
            is_healthy=read_only(self._is_healthy),
        )

    @property
    def label(self) -> str:
        """Names the router in force."""
        return self._router.label

    @property
    def generation(self) -> int:
        """Changes every time that another router takes over."""
        return self._router.generation

    @property
    def num_quarantined(self) -> int:
        """Routers that were replaced so far."""
        return self._router.num_quarantined

    # ------------------------------------------------------------------------------------------------ replicas

    def added(self, replica: int, client: RoutedEngine) -> None:
        """Note a replica that is ready."""
        self._clients[replica], self._is_draining[replica], self._looked_s = client, False, -np.inf
        self._router.on_replica_added(replica)

    def removed(self, replica: int) -> None:
        """Note a replica that has ended; its requests are withdrawn one by one."""
        self._clients[replica], self._is_draining[replica], self._looked_s = None, False, -np.inf
        self._num_waiting[replica] = self._num_running[replica] = 0
        self._kv_usage[replica] = 0.0
        self._index.drop(replica)
        self._router.on_replica_removed(replica)

    def draining(self, replica: int) -> None:
        """Note a replica that is to take nothing new."""
        self._is_draining[replica], self._looked_s = True, -np.inf

    def loaded(self, replica: int, load: EngineLoad) -> None:
        """Note what a replica says of itself; hashes may be whole, as an engine has them, or cut, as its messages have them."""
        self._num_waiting[replica], self._num_running[replica] = load.num_waiting, load.num_running
        self._kv_usage[replica] = load.kv_usage
        if self._router.needs_prefixes:
            self._index.update(replica, added=map(_cut, load.added), removed=map(_cut, load.removed))

    def describe(self) -> list[dict[str, Any]]:
        """Return what replicas have said of themselves, for operators."""
        return [
            {"num_waiting": int(waiting), "num_running": int(running), "kv_usage": float(usage)}
            for waiting, running, usage in zip(self._num_waiting, self._num_running, self._kv_usage, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------ requests

    def facts(self, request: Request | EmbeddingRequest) -> RoutingRequest:
        """Return what the router is shown of a request or a text. O(length)."""
        if isinstance(request, EmbeddingRequest):
            return RoutingRequest(token_ids=request.token_ids)
        hashes: tuple[bytes, ...] = ()
        if self._hasher is not None and self._router.needs_prefixes:
            hashes = _hashes(request, self._hasher)
        return RoutingRequest(
            token_ids=request.known_token_ids,
            block_hashes=hashes,
            tenant=request.tenant.partition("/")[0],
            user=request.tenant,
        )

    def select(self, request: RoutingRequest) -> int:
        """Return the replica that takes a request, which counts as its own from now on; at least one is there."""
        chosen = self._router.ask.select(request, self._seen(request))
        self._taken(request, chosen)
        return chosen

    def _taken(self, request: RoutingRequest, replica: int) -> None:
        self._num_live[replica] += 1
        if request.block_hashes:
            self._index.expect(replica, request.block_hashes)

    def move(self, request: RoutingRequest, replica: int) -> bool:
        """Return whether the replica takes a request that was to move there, which counts as its own then; else select another."""
        if self._router.moves_period_s == np.inf or not self.views().is_healthy[replica]:
            return False
        self._taken(request, replica)
        self._router.on_moved(request, replica)
        return True

    def withdrawn(self, request: RoutingRequest, replica: int, *, generation: int) -> None:
        """Note that a request has ended, or leaves its replica.

        Args:
            request: Which.
            replica: That had it.
            generation: When it was selected.
        """
        self._num_live[replica] -= 1
        if request.block_hashes:
            self._index.forget(replica, request.block_hashes)
        self._router.on_finished(request, replica, generation=generation)

    def peek(self, request: RoutingRequest) -> dict[str, Any]:
        """Return where a request would go now, and the blocks of it that each replica has."""
        views = self._seen(request)
        return {
            "replica": self._router.ask.peek(request, views),
            "num_blocks": len(request.block_hashes),
            "hit_blocks": views.hit_blocks.tolist(),
            "num_live": views.num_live.tolist(),
            "is_healthy": views.is_healthy.tolist(),
        }

    def views(self) -> ReplicaViews:
        """Return the views for no request."""
        return self._seen(_NONE)

    def _seen(self, request: RoutingRequest) -> ReplicaViews:
        """Return the views for a request."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s >= _HEALTH_S:
            self._looked_s = now_s
            self._look()
        self._index.hits(request.block_hashes, self._hit_blocks)
        return self._views

    def _look(self) -> None:
        """Find out which replicas are healthy; if none is, those that are left count as it."""
        is_there = np.array([client is not None for client in self._clients], np.bool_)
        progresses = np.array([client is not None and not client.stalled for client in self._clients], np.bool_)
        for good in (progresses & ~self._is_draining, progresses, is_there):
            self._is_healthy[:] = good
            if good.any():
                return


def _hashes(request: Request, hasher: BlockHasher) -> tuple[bytes, ...]:
    """Return the cut hashes of a request's full blocks, but for the last token, whose logits have to be computed. Pure."""
    tokens = np.array(request.known_token_ids, np.int32)
    hashes: list[bytes] = []
    num_blocks = (len(tokens) - 1) // hasher.block_size
    hasher.extend(hashes, tokens, num_blocks=num_blocks, salt=request.cache_salt)
    return tuple(map(_cut, hashes))
