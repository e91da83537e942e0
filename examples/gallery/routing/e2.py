"""E2 of Preble: a request follows its prefix if most of the prompt is cached somewhere, and else goes where it costs least.

    cached share of the prompt above a half? ── yes ▶ exploit: the least loaded of the replicas with most of it
                 │ no                                  └── its load above load_ratio times the least ▶ the least loaded replica
                 └──▶ explore: the least of (load of the last window_s) + (prompt tokens that the replica does not have)

Name it by import path, ``router.name = "examples.gallery.routing.e2:E2"``, or as the plugin that this module is.

Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024, section 3; the constants are those of the
authors' program, github.com/WukLab/preble, ``multi_node/global_scheduler_with_time.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
from attrs.validators import ge, gt

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, ReplicaViews, Router, RoutingRequest, setting
from trencadis.records import FloatArray

__all__ = ["E2", "E2Config", "trencadis_routers"]

_NUM_SLICES = 18
"""Parts of the window, the oldest of which is forgotten at once."""


class E2(Router):
    """Exploits prefixes or explores replicas, by the share of the prompt that is cached. O(replicas) a call.

    Loads and costs are in prompt tokens to compute: prefill dominates where prompts are long, and takes time in proportion to them.

    Args:
        window_s: Requests that were sent within so many seconds are the load of a replica.
        load_ratio: A replica whose load is more than so many times the least one gets no request for its prefix.
        answer_tokens: Prompt tokens that take as long to compute as an answer; routers are not told how long answers are.
        context: Gives the clock.
    """

    needs_prefixes = True

    def __init__(
        self, window_s: float = 180.0, load_ratio: float = 15.0, answer_tokens: int = 0, *, context: ComponentContext
    ) -> None:
        self._slice_s = window_s / _NUM_SLICES
        self._load_ratio = load_ratio
        self._answer_tokens = answer_tokens
        self._clock = context.clock
        self._slices = np.zeros((_NUM_SLICES, 0))
        self._newest = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the one by the rule."""
        load = self._loads(len(replicas.num_live))
        cached = self._cached_tokens(request, replicas)
        longest = cached[replicas.is_healthy].max()
        if longest > len(request.token_ids) - longest:
            chosen = _least(load, replicas.is_healthy & (cached == longest))
            lightest = _least(load, replicas.is_healthy)
            least = load[lightest] + len(request.token_ids)  # as if it took the prompt: at the start it has nothing
            return chosen if load[chosen] <= self._load_ratio * least else lightest
        return _least(load - cached, replicas.is_healthy)

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the one by the rule, and add what it has to compute to its load."""
        chosen = self.peek(request, replicas)
        now = self._now()
        for passed in range(self._newest + 1, min(now, self._newest + _NUM_SLICES) + 1):
            self._slices[passed % _NUM_SLICES] = 0.0
        self._newest = max(now, self._newest)
        missing = len(request.token_ids) - self._cached_tokens(request, replicas)[chosen]
        self._grown(len(replicas.num_live))[self._newest % _NUM_SLICES, chosen] += missing + self._answer_tokens
        return chosen

    def on_replica_removed(self, replica: int) -> None:
        """Forget its load: what it had goes elsewhere, and is counted there."""
        if replica < self._slices.shape[1]:
            self._slices[:, replica] = 0.0

    def _now(self) -> int:
        return int(self._clock.now_s() / self._slice_s)

    def _loads(self, num_replicas: int) -> FloatArray:
        """Return the load of each replica in the window. Pure but for room for more replicas."""
        numbers = np.arange(_NUM_SLICES)
        ages = (self._newest - numbers) % _NUM_SLICES + max(0, self._now() - self._newest)
        load: FloatArray = self._grown(num_replicas)[ages < _NUM_SLICES, :num_replicas].sum(axis=0)
        return load

    def _grown(self, num_replicas: int) -> FloatArray:
        missing = num_replicas - self._slices.shape[1]
        if missing > 0:
            self._slices = np.pad(self._slices, ((0, 0), (0, missing)))
        return self._slices

    @staticmethod
    def _cached_tokens(request: RoutingRequest, replicas: ReplicaViews) -> FloatArray:
        """Return how many tokens of the prompt each replica has; blocks are full but the last, which none counts."""
        per_block = len(request.token_ids) / max(1, len(request.block_hashes))
        cached: FloatArray = replicas.hit_blocks * np.float64(per_block)
        return cached


def _least(cost: FloatArray, allowed: np.ndarray) -> int:
    """Return the first of the cheapest replicas that are allowed. Pure."""
    return int(np.where(allowed, cost, np.inf).argmin())


@attrs.frozen(kw_only=True)
class E2Config:
    """Table ``[router.e2]``."""

    window_s: float = setting(
        180.0, "Requests of so many seconds are the load of a replica.", unit="s", validator=gt(0)
    )
    load_ratio: float = setting(15.0, "Beyond so many times the least load prefixes do not count.", validator=ge(1))
    answer_tokens: int = setting(
        0, "Prompt tokens that take as long to compute as an answer.", unit="tokens", validator=ge(0)
    )


@hookimpl
def trencadis_routers() -> Iterable[Component]:
    """Yield ``e2``."""
    yield Component(
        name="e2",
        factory=_make,
        config=E2Config,
        summary="Preble's E2: follows prefixes or explores replicas.",
        interface_version=1,
        stability="experimental",
    )


def _make(config: E2Config, context: ComponentContext) -> E2:
    return E2(config.window_s, config.load_ratio, config.answer_tokens, context=context)
