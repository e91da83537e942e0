"""Asks a router which requests are to move, and lets through what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trencadis.api import RouterConfig
from trencadis.clock import Clock
from trencadis.interfaces import LiveRequests, Move, ReplicaViews
from trencadis.records import Request, read_only
from trencadis_remote.replicas.guarded_router import GuardedRouter
from trencadis_remote.replicas.routing import Routing

__all__ = ["LiveRow", "Mover"]


class LiveRow(NamedTuple):
    """A request that a replica has.

    Attributes:
        request: Request of the client.
        replica: That has it.
        num_output_tokens: That the client has received.
        num_moves: Times that it was moved.
        target: Replica that it is on its way to; -1: none.
        stays: It is being ended, or cannot go on elsewhere.
    """

    request: Request
    replica: int
    num_output_tokens: int
    num_moves: int
    target: int = -1
    stays: bool = False


class Mover:
    """Decides moves of requests between replicas. Used by the client's thread.

    Args:
        router: Guarded; the one that was configured supports moves.
        routing: Shows it the replicas.
        config: Limits.
        num_replicas: Replicas 0 .. num_replicas - 1.
        clock: Measures the period and the rate.

    Attributes:
        num_refused: Moves that the router asked for and that were not made.
    """

    def __init__(
        self, router: GuardedRouter, routing: Routing, config: RouterConfig, *, num_replicas: int, clock: Clock
    ) -> None:
        self.num_refused = 0
        self._router = router
        self._routing = routing
        self._max_moves = config.max_moves
        self._rate = config.max_moves_per_s * num_replicas
        self._most_at_once = max(1.0, self._rate)
        self._allowed = self._most_at_once
        self._clock = clock
        self._asked_s = clock.now_s()

    @property
    def period_s(self) -> float:
        """Seconds between two calls; infinity if the router has been replaced by one that moves nothing."""
        return self._router.moves_period_s

    @property
    def is_due(self) -> bool:
        """Whether the period is over."""
        return self._clock.now_s() - self._asked_s >= self.period_s

    def choose(self, live: Sequence[LiveRow]) -> list[Move]:
        """Return the moves to make now. O(requests).

        Args:
            live: In the order in which they were sent to their replicas.
        """
        now_s = self._clock.now_s()
        self._allowed = min(self._most_at_once, self._allowed + self._rate * (now_s - self._asked_s))
        self._asked_s = now_s
        if not live:
            return []
        columns, views = self._columns(live), self._routing.views()
        chosen: list[Move] = []
        taken = [False] * len(live)
        for request, replica in self._router.moves(columns, views):
            if not _is_legal(request, replica, columns, views) or taken[request] or self._allowed < 1.0:
                self.num_refused += 1
                continue
            self._allowed -= 1.0
            taken[request] = True
            chosen.append(Move(int(request), int(replica)))
        return chosen

    def _columns(self, live: Sequence[LiveRow]) -> LiveRequests:
        requests, replica, num_output_tokens, num_moves, targets, stays = zip(*live, strict=True)
        moves, target = np.array(num_moves, np.int32), np.array(targets, np.int32)
        return LiveRequests(
            replica=read_only(np.array(replica, np.int32)),
            num_prompt_tokens=read_only(np.array([len(one.prompt_token_ids) for one in requests], np.int32)),
            num_output_tokens=read_only(np.array(num_output_tokens, np.int32)),
            num_moves=read_only(moves),
            target=read_only(target),
            priority=read_only(np.array([one.priority for one in requests], np.int64)),
            tenants=tuple([one.tenant.partition("/")[0] for one in requests]),
            is_movable=read_only(~np.array(stays, np.bool_) & (target < 0) & (moves < self._max_moves)),
        )


def _is_legal(request: int, replica: int, live: LiveRequests, replicas: ReplicaViews) -> bool:
    """Return whether a request is there and may move, to another replica that may be chosen. Pure."""
    if not (0 <= request < len(live.replica) and 0 <= replica < len(replicas.is_healthy)):
        return False
    return bool(live.is_movable[request] and replicas.is_healthy[replica] and live.replica[request] != replica)
