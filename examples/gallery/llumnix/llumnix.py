"""Llumnix: requests go to the freest replica, and move from the least free ones to the freest.

    freeness = (free KV tokens - demand of the first request that waits) / (requests that run, and one if some wait)

    select      ▶ the largest, with all that waits as demand
    moves       ▶ least free ──(a running request, the least important and shortest)──▶ freest
                  where the least free is below ``out_below``, or has preempted a request, and the other is above and has room

Name it by import path, ``router.name = "examples.gallery.llumnix.llumnix:Llumnix"``, or as the plugin that this module is.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024, section 4; constants and details are those
of the authors' program, github.com/AlibabaPAI/llumnix, 24220fb8: ``load_computation.py``, ``global_scheduler/migration_policy.py`` and
``migration_filter.py``, ``llumlet/local_migration_scheduler.py``, ``config/default.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from attrs.validators import ge, gt

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import (
    Component,
    ComponentContext,
    LiveRequests,
    Move,
    ReplicaViews,
    Router,
    RoutingRequest,
    SupportsMoves,
    setting,
)
from trencadis.records import FloatArray, Int64Array

__all__ = ["LeastUsed", "Llumnix", "LlumnixConfig", "trencadis_routers"]


class LeastUsed(Router):
    """The replica with the least KV in use and asked for, as INFaaS with the paper's improvements: the baseline that knows loads.

    Of requests of a replica those that came last wait, as long as it serves them in the order of arrival.

    Args:
        kv_tokens: That a replica's KV cache holds.
    """

    def __init__(self, kv_tokens: int = 13_616) -> None:
        self._kv_tokens = kv_tokens
        self._sent: defaultdict[int, list[int]] = defaultdict(list)

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the one with most room; of equals the one with the fewest requests, then the first."""
        room = np.where(replicas.is_healthy, self._room(replicas), -np.inf)
        best = np.flatnonzero(room == room.max())
        return int(best[replicas.num_live[best].argmin()])

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return it, and remember what was sent there."""
        chosen = self.peek(request, replicas)
        self._sent[chosen].append(len(request.token_ids))
        return chosen

    def on_finished(self, request: RoutingRequest, replica: int) -> None:
        """Forget a request of that length."""
        if len(request.token_ids) in self._sent[replica]:
            self._sent[replica].remove(len(request.token_ids))

    def _room(self, replicas: ReplicaViews) -> FloatArray:
        """Return free tokens less what waits for some, of each replica."""
        room: FloatArray = (1.0 - replicas.kv_usage) * self._kv_tokens
        num_waiting = replicas.num_live - replicas.num_running
        for replica in np.flatnonzero(num_waiting > 0).tolist():
            room[replica] -= sum(self._sent[replica][-int(num_waiting[replica]) :])
        return room


class Llumnix(LeastUsed, SupportsMoves):
    """Chooses and moves by freeness. O(replicas) a choice, O(requests log requests) to ask for moves.

    Args:
        kv_tokens: That a replica's KV cache holds.
        out_below: Blocks for each request: a replica with less freeness gives requests away, one with more takes some.
        block_tokens: Of a block.
        headroom_tokens: Kept free on a replica that has requests of a priority below 0, as if they used them.
        moves_waiting: Of the requests that wait the first one moves, which costs nothing, and running ones only if none waits.
    """

    moves_period_s = 0.05

    def __init__(
        self,
        kv_tokens: int = 13_616,
        out_below: float = -3.0,
        block_tokens: int = 16,
        headroom_tokens: int = 0,
        moves_waiting: bool = False,
    ) -> None:
        super().__init__(kv_tokens)
        self._out_below = out_below * block_tokens
        self._block_tokens = block_tokens
        self._headroom_tokens = headroom_tokens
        self._moves_waiting = moves_waiting

    def on_moved(self, request: RoutingRequest, replica: int) -> None:
        """Remember it at the replica that takes it."""
        self._sent[replica].append(len(request.token_ids))

    def moves(self, live: LiveRequests, replicas: ReplicaViews) -> Sequence[Move]:
        """Return at most one move from each replica and one to each: the least free with the freest, and so on."""
        count = len(replicas.num_live)
        order = np.argsort(live.replica, kind="stable")  # by replica; of each those that came last wait
        num_here = np.bincount(live.replica, minlength=count)
        ends = np.cumsum(num_here)
        firsts = ends - np.maximum(0, num_here - replicas.num_running)
        tokens = live.num_prompt_tokens.astype(np.int64) + live.num_output_tokens
        room = self._rooms(live, replicas, tokens, order, firsts, ends)
        batch = replicas.num_running + (firsts < ends)
        freeness = np.where(batch > 0, room / np.maximum(batch, 1), np.inf)
        was_preempted = np.concatenate([[0], np.cumsum(((live.num_output_tokens > 0) & (live.num_moves == 0))[order])])
        gives = (freeness <= self._out_below) | (was_preempted[ends] > was_preempted[firsts])
        is_busy = np.zeros(count, np.bool_)  # with a move
        moving = live.target >= 0
        is_busy[live.replica[moving]] = is_busy[live.target[moving]] = True
        ranked = np.argsort(freeness, kind="stable")
        freest = ranked[::-1][(~gives & ~is_busy & replicas.is_healthy)[ranked[::-1]]].tolist()
        moves = []
        for source in ranked[(gives & ~is_busy)[ranked]].tolist():
            here = order[ends[source] - num_here[source] : ends[source]]
            chosen = self._victim(live, tokens, here, int(ends[source] - firsts[source]))
            if chosen >= 0 and freest and tokens[chosen] + self._block_tokens <= room[freest[0]]:
                moves.append(Move(chosen, freest.pop(0)))
        return moves

    def _rooms(
        self,
        live: LiveRequests,
        replicas: ReplicaViews,
        tokens: Int64Array,
        order: Int64Array,
        firsts: Int64Array,
        ends: Int64Array,
    ) -> FloatArray:
        """Return free tokens of each replica, less the demand of the first request that waits and the headroom."""
        room: FloatArray = (1.0 - replicas.kv_usage) * self._kv_tokens
        waits = np.flatnonzero(firsts < ends)
        room[waits] -= tokens[order[firsts[waits]]]
        if self._headroom_tokens:
            room[np.unique(live.replica[live.priority < 0])] -= self._headroom_tokens
        return room

    def _victim(self, live: LiveRequests, tokens: Int64Array, here: Int64Array, num_waiting: int) -> int:
        """Return the request of a replica that is to leave it, or -1.

        Args:
            live: Requests.
            tokens: Of each.
            here: Those of the replica; those that wait come last.
            num_waiting: So many wait.
        """
        running, waiting = np.split(here, [len(here) - num_waiting])
        if self._moves_waiting and waiting.size and live.is_movable[waiting[0]]:
            return int(waiting[0])
        running = running[live.is_movable[running] & (live.num_output_tokens[running] > 0)]
        if not running.size:
            return -1
        return int(running[np.lexsort((tokens[running], -live.priority[running]))[0]])

    def _room(self, replicas: ReplicaViews) -> FloatArray:
        """Return the freeness of each replica with all that waits."""
        room, num_live = super()._room(replicas), replicas.num_live
        return np.where(num_live > 0, room / np.maximum(num_live, 1), np.inf)


@attrs.frozen(kw_only=True)
class LlumnixConfig:
    """Table ``[router.llumnix]``."""

    kv_tokens: int = setting(13_616, "Tokens that the KV cache of a replica holds.", unit="tokens", validator=gt(0))
    out_below: float = setting(
        -3.0, "Replicas with less freeness give requests away, those with more take some.", unit="blocks"
    )
    block_tokens: int = setting(16, "Tokens of a block.", unit="tokens", validator=gt(0))
    headroom_tokens: int = setting(
        0, "Kept free beside requests of a priority below 0.", unit="tokens", validator=ge(0)
    )
    moves_waiting: bool = setting(False, "Move the first request that waits, rather than one that runs.")


@hookimpl
def trencadis_routers() -> Iterable[Component]:
    """Yield ``llumnix``."""
    yield Component(
        name="llumnix",
        factory=_make,
        config=LlumnixConfig,
        summary="Llumnix: the freest replica, and moves from the least free.",
        interface_version=1,
        stability="experimental",
    )


def _make(config: LlumnixConfig, context: ComponentContext) -> Llumnix:
    return Llumnix(**attrs.asdict(config))
