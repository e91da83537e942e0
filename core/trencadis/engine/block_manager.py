"""KV blocks: who holds which, which are free, which are kept for reuse.

    free ──allocate──▶ used ──release (no hash)──▶ free
                        │  ▲
          release (hash)│  │acquire (prefix hit)
                        ▼  │
                       cached ──evict──▶ used

At any time ``free + cached + used == num_blocks``. Only full blocks of committed tokens have a hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.engine.guards import GuardedEviction
from trencadis.errors import InternalError
from trencadis.records import Int32Array

__all__ = ["BlockManager"]


class BlockManager:
    """Reference counts, the free stack, and the map from hash to block.

    Args:
        num_blocks: Blocks 0 .. num_blocks - 1.
        eviction: Decides which cached blocks go first.
    """

    def __init__(self, *, num_blocks: int, eviction: GuardedEviction) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self._stack: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self._eviction = eviction
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._depth_of: dict[int, int] = {}
        self._cached: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and that are kept for reuse."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that sequences or transfers hold."""
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int) -> Int32Array:
        """Return ``num_blocks`` blocks with reference count 1, evicting cached ones if need be.

        Raises:
            InternalError: The caller did not check ``num_available``.
        """
        if num_blocks > self.num_available:
            raise InternalError(f"{num_blocks} blocks asked for, {self.num_available} available")
        if num_blocks > self.num_free:
            self._evict(num_blocks - self.num_free)
        blocks = self._stack[self.num_free - num_blocks : self.num_free][::-1].copy()
        self.num_free -= num_blocks
        self.ref_counts[blocks] = 1
        return blocks

    def longest_hit(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached or used blocks that hold the longest chain from the head. Pure."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody references: acquiring them makes as many fewer available. Pure."""
        cached = self._cached
        return sum(block in cached for block in blocks)

    def acquire(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Reference blocks of a prefix hit, in chain order."""
        woken = [block for block in blocks if block in self._cached]
        if woken:
            self._cached.difference_update(woken)
            self._eviction.on_hit(woken, now_s=now_s)
        self.ref_counts[np.asarray(blocks, np.int32)] += 1

    def release(self, blocks: Int32Array, *, now_s: float) -> None:
        """Drop one reference of each block, given in table order; what nobody holds is freed or kept for reuse."""
        counts = self.ref_counts[blocks] - 1
        if counts.size and counts.min() < 0:
            raise InternalError(f"blocks {blocks[counts < 0].tolist()} released more often than acquired")
        self.ref_counts[blocks] = counts
        idle = blocks[counts == 0]
        hash_of = self._hash_of
        kept = [block for block in idle.tolist() if block in hash_of] if hash_of else []
        if kept:
            kept.reverse()  # the tail goes first: a block is useless without those before it
            self._cached.update(kept)
            self._eviction.on_free(kept, depths=[self._depth_of[block] for block in kept], now_s=now_s)
            idle = np.array([block for block in idle.tolist() if block not in hash_of], np.int32)
        self._push(idle)

    def register(self, block: int, block_hash: bytes, *, depth: int) -> bool:
        """Make a used, full, committed block findable; False if its content is cached under another block already."""
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._depth_of[block] = depth
        return True

    def reset_cache(self) -> int:
        """Forget every hash and free every cached block; returns how many were freed."""
        cached = sorted(self._cached)
        self._eviction.forget(cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()
        self._depth_of.clear()
        self._push(np.array(cached, np.int32))
        return len(cached)

    def swap(self, sources: Int32Array, targets: Int32Array, *, now_s: float) -> None:
        """Rename used blocks: what is known of each source is now known of its target, and the other way round.

        Args:
            sources: Used blocks, int32 ``[n]``, none twice.
            targets: Blocks that nobody references, free or cached, int32 ``[n]``, none twice.
            now_s: Engine clock, seconds.
        """
        counts = self.ref_counts
        if counts[targets].any() or not counts[sources].all():
            raise InternalError(f"blocks {sources.tolist()} cannot take the places of {targets.tolist()}")
        counts[targets], counts[sources] = counts[sources], 0
        to = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        pushed = np.arange(self.num_blocks, dtype=np.int32)
        pushed[targets] = sources
        self._stack[: self.num_free] = pushed[self._stack[: self.num_free]]
        woken = [block for block in to if block in self._cached]
        moved = [(block, self._depth_of[block]) for block in woken]
        for target, source in to.items():
            self._swap_hashes(source, target)
        if moved:
            self._cached.difference_update(woken)
            self._eviction.forget(woken)
            self._cached.update(to[block] for block in woken)
            self._eviction.on_free([to[block] for block, _ in moved], depths=[depth for _, depth in moved], now_s=now_s)

    def _swap_hashes(self, source: int, target: int) -> None:
        for by_block in (self._hash_of, self._depth_of):
            values = {b: by_block.pop(a) for a, b in ((source, target), (target, source)) if a in by_block}
            by_block.update(values)  # type: ignore[arg-type]
        for block in (source, target):
            if block in self._hash_of:
                self._block_of[self._hash_of[block]] = block

    def _evict(self, num_blocks: int) -> None:
        victims = self._eviction.victims(num_blocks, candidates=self._cached)
        for block in victims:
            self._cached.discard(block)
            self._depth_of.pop(block)
            del self._block_of[self._hash_of.pop(block)]
        self._push(np.array(victims, np.int32))

    def _push(self, blocks: Int32Array) -> None:
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
