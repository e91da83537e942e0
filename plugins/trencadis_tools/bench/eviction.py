"""Prefix hits of eviction policies on a trace of block hashes: the policies that the engine runs, without the engine.

    request ▶ hits counted ▶ on_hit, on_use ▶ on_free, tail first ▶ victims until the rest fits

Requests run one after the other and hold their blocks for no time. A cached block whose predecessor has been evicted
does not count as a hit, but as a use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trencadis.api import GuardedEviction
from trencadis.interfaces import EvictionPolicy
from trencadis_tools.bench.block_trace import BlockRequest

__all__ = ["EvictionResult", "best_hit_ratio", "measure_eviction"]


@attrs.frozen(kw_only=True)
class EvictionResult:
    """Counts of one policy with one cache size.

    Attributes:
        policy: Name of the eviction policy.
        capacity: Blocks that the cache holds.
        hit_ratio: ``num_hits / num_references``, 0 to 1.
        num_hits: Blocks found in the cache together with all their predecessors.
        num_references: Blocks requested.
        num_evictions: Blocks evicted.
        num_orphaning: Evictions of a block while a successor was still cached: the successor can no longer be found, but occupies a
            block.
        num_unused: Evictions of blocks that no later request found.
    """

    policy: str
    capacity: int
    hit_ratio: float
    num_hits: int
    num_references: int
    num_evictions: int
    num_orphaning: int
    num_unused: int


def best_hit_ratio(requests: Sequence[BlockRequest], *, from_s: float = 0.0) -> float:
    """Return the hit ratio of a cache that never has to evict, 0 .. 1. Pure.

    Args:
        requests: Requests in order of arrival.
        from_s: Start of counting, seconds; earlier requests only fill the cache.
    """
    seen: set[int] = set()
    num_hits = num_references = 0
    for request in requests:
        if request.arrival_s >= from_s:
            num_references += len(request.contents)
            num_hits += sum(content in seen for content in request.contents)
        seen.update(request.contents)
    return num_hits / num_references if num_references else 0.0


def measure_eviction(
    name: str,
    make: Callable[[], EvictionPolicy],
    requests: Sequence[BlockRequest],
    *,
    capacity: int,
    from_s: float = 0.0,
    tail_first: bool = True,
    chain_order: bool = False,
) -> EvictionResult:
    """Run a new policy over a trace. O(log n) per block.

    Args:
        name: Name of the policy.
        make: Returns a new instance of the policy.
        requests: Requests in order of arrival.
        capacity: Blocks that the cache holds, 1 or more.
        from_s: Start of counting, seconds; earlier requests only fill the cache.
        tail_first: True: free the last block of a request first, as the engine does; False: the first block first.
        chain_order: Evict a block together with the blocks that can only be found through it, as the engine does.

    Raises:
        StepFailedError: The policy raised, or named a victim that is not a candidate.
    """
    cache = _Cache(GuardedEviction(f"eviction policy {name}", make()), capacity, chain_order=chain_order)
    num_references = num_hits = 0
    before = (0, 0, 0)
    for request in requests:
        if request.arrival_s < from_s:
            cache.use(request, tail_first=tail_first)
            before = cache.num_evictions, cache.num_orphaning, cache.num_unused
            continue
        num_hits += cache.num_found(request.contents)
        num_references += len(request.contents)
        cache.use(request, tail_first=tail_first)
    return EvictionResult(
        policy=name,
        capacity=capacity,
        hit_ratio=num_hits / num_references if num_references else 0.0,
        num_hits=num_hits,
        num_references=num_references,
        num_evictions=cache.num_evictions - before[0],
        num_orphaning=cache.num_orphaning - before[1],
        num_unused=cache.num_unused - before[2],
    )


class _Cache:
    """Blocks and their contents; between two requests every cached block is a candidate."""

    def __init__(self, policy: GuardedEviction, capacity: int, *, chain_order: bool) -> None:
        self.num_evictions = self.num_orphaning = self.num_unused = 0
        self._policy = policy
        self._capacity = capacity
        self._chain_order = chain_order
        self._block_of: dict[int, int] = {}
        self._content_of: dict[int, int] = {}
        self._cached: set[int] = set()
        self._free: list[int] = []
        self._num_ids = 0
        self._previous: dict[int, int] = {}
        self._successors: dict[int, dict[int, None]] = {}
        self._reused: set[int] = set()

    def num_found(self, contents: Sequence[int]) -> int:
        """Return how many blocks from the head on are cached. Pure."""
        for i, content in enumerate(contents):
            if content not in self._block_of:
                return i
        return len(contents)

    def use(self, request: BlockRequest, *, tail_first: bool) -> None:
        """Read or compute the blocks of a request, free them, then evict until the rest fits."""
        contents, now_s = request.contents, request.arrival_s
        found = [self._block_of[content] for content in contents if content in self._block_of]
        self._reused.update(found)
        for i, content in enumerate(contents):
            if content not in self._block_of:
                self._insert(content, contents[i - 1] if i else None)
        blocks, depths = [self._block_of[content] for content in contents], range(len(contents))
        keys = [content.to_bytes(8, "little", signed=True) for content in contents]
        self._policy.on_hit(found, now_s=now_s)
        self._policy.on_use(blocks, keys=keys, depths=depths, salt="", now_s=now_s)
        order = slice(None, None, -1 if tail_first else 1)
        self._policy.on_free(blocks[order], depths=depths[order], now_s=now_s)
        self._cached.update(blocks)
        if len(self._cached) > self._capacity:
            self._evict(len(self._cached) - self._capacity)

    def _insert(self, content: int, previous: int | None) -> None:
        if self._free:
            block = self._free.pop()
        else:
            block = self._num_ids
            self._num_ids += 1
        self._block_of[content] = block
        self._content_of[block] = content
        if previous is not None:
            self._previous[content] = previous
            self._successors.setdefault(previous, {})[content] = None

    def _evict(self, num_blocks: int) -> None:
        victims = self._policy.victims(num_blocks, candidates=self._cached)
        unfit: list[int] = []
        orphans: list[int] = []
        for block in victims:
            self.num_orphaning += self._content_of[block] in self._successors
            orphans += self._remove(block)
        while self._chain_order and orphans:
            block = self._block_of.get(orphans.pop(), -1)
            if block >= 0:
                unfit.append(block)
                orphans += self._remove(block)
        if unfit:
            self._policy.forget(unfit)

    def _remove(self, block: int) -> list[int]:
        """Remove a block; return the contents of its successors."""
        content = self._content_of.pop(block)
        del self._block_of[content]
        self._cached.remove(block)
        self._free.append(block)
        self.num_evictions += 1
        self.num_unused += block not in self._reused
        self._reused.discard(block)
        previous = self._previous.pop(content, None)
        if previous is not None:
            del self._successors[previous][content]
            if not self._successors[previous]:
                del self._successors[previous]
        return list(self._successors.get(content, ()))
