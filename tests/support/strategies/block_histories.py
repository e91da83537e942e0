"""Random histories of a prefix cache, and what a policy evicts in them."""

from __future__ import annotations

import random
from collections.abc import Callable

from trencadis.interfaces import EvictionPolicy
from trencadis_tools.bench.block_trace import BlockRequest
from trencadis_tools.bench.eviction import measure_eviction


def conversations(seed: int, *, num_requests: int = 400, num_sessions: int = 40) -> list[BlockRequest]:
    """Sessions that share a first block and grow turn by turn; those opened last go on most often."""
    rng = random.Random(seed)
    sessions: list[list[int]] = []
    requests = []
    next_content = 1
    for number in range(num_requests):
        if len(sessions) < num_sessions and (not sessions or rng.random() < 0.3):
            sessions.append([0])
        session = sessions[min(int(rng.expovariate(0.15)), len(sessions) - 1) - len(sessions)]
        grown = rng.randint(0, 3)
        session += range(next_content, next_content + grown)
        next_content += grown
        requests.append(BlockRequest(float(number), tuple(session)))
    return requests


def hits_of(make: Callable[[], EvictionPolicy], requests: list[BlockRequest], capacity: int) -> int:
    """Return the hits of a policy of ours."""
    return measure_eviction("mine", make, requests, capacity=capacity).num_hits


class ReferenceCache:
    """The rules of a trace-driven cache over contents alone, for references written from a policy's definition.

    A subclass has ``__contains__``, ``use(content, now_s)`` and ``evict_one()``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def hits(self, requests: list[BlockRequest]) -> int:
        num_hits = 0
        cached: set[int] = set()
        for request in requests:
            for content in request.contents:
                if content not in cached:
                    break
                num_hits += 1
            for content in reversed(request.contents):
                self.use(content, request.arrival_s)
                cached.add(content)
            while len(cached) > self.capacity:
                cached.remove(self.evict_one())
        return num_hits

    def use(self, content: int, now_s: float) -> None:
        raise NotImplementedError

    def evict_one(self) -> int:
        raise NotImplementedError
