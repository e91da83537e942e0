"""KV blocks in partitions: each rank of a stage has the blocks of its own sequences, and no other.

    partition 0             partition 1
    ids 0 .. n - 1          ids n .. 2 n - 1
    its own free blocks, prefix cache and eviction policy

A sequence has all its blocks in one partition, so that one block of it tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trencadis.engine.cache.block_manager import BlockManager, BlockSnapshot
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.errors import InternalError
from trencadis.records import Int32Array

__all__ = ["PartitionedBlocks"]


class PartitionedBlocks(BlockManager):
    """Partitions of equal size as one block manager: counts are sums, and calls about a sequence go to its partition.

    Blocks are allocated in a partition, not here.

    Args:
        num_blocks: Blocks of all partitions, a multiple of their number.
        evictions: One for each partition: a policy chooses among all candidates that it was told of.
    """

    def __init__(self, *, num_blocks: int, evictions: Sequence[GuardedEviction]) -> None:
        size = num_blocks // len(evictions)
        self.num_blocks, self.first = num_blocks, 0
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._parts = tuple(
            BlockManager(num_blocks=size, eviction=one, first=number * size, ref_counts=self.ref_counts)
            for number, one in enumerate(evictions)
        )
        self.on_change: list[Callable[[bytes], None]] = []
        for part in self._parts:
            part.on_change = self.on_change

    @property
    def num_free(self) -> int:  # type: ignore[override]  # read only here
        """Blocks whose content is not kept."""
        return sum(part.num_free for part in self._parts)

    @property
    def num_available(self) -> int:  # type: ignore[override]
        """Blocks that can be allocated now, over all partitions."""
        return sum(part.num_available for part in self._parts)

    @property
    def num_cached(self) -> int:
        """Blocks without references and that are kept for reuse."""
        return sum(part.num_cached for part in self._parts)

    @property
    def parts(self) -> Sequence[BlockManager]:
        """The partitions."""
        return self._parts

    def allocate(self, num_blocks: int) -> Int32Array:
        """Refuse: blocks are some partition's.

        Raises:
            InternalError: Always.
        """
        raise InternalError(f"{num_blocks} blocks asked for of no partition")

    def longest_hit(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the longest chain from the head that a partition holds, of the first such one. Pure."""
        return max((part.longest_hit(hashes) for part in self._parts), key=len)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that have become findable in any partition since the last call, and those that are in none any more."""
        changes = [part.take_changes() for part in self._parts]  # each is told of the changes of all
        found = dict.fromkeys(one for added, _ in changes for one in added)
        lost = dict.fromkeys(one for _, removed in changes for one in removed)
        return list(found), [one for one in lost if one not in found]

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's blocks have no references. Pure."""
        return self._of(blocks).num_unreferenced(blocks) if len(blocks) else 0

    def acquire(self, blocks: Sequence[int], *, now_s: float, salt: str = "") -> None:
        """Reference blocks of a prefix hit."""
        self._of(blocks).acquire(blocks, now_s=now_s, salt=salt)

    def share(self, blocks: Int32Array) -> None:
        """Reference used blocks of one partition once more."""
        if blocks.size:
            self._of(blocks).share(blocks)

    def release(self, blocks: Int32Array, *, now_s: float) -> None:
        """Drop one reference of each block of a sequence, given in table order."""
        if blocks.size:
            self._of(blocks).release(blocks, now_s=now_s)

    def register_chain(
        self, blocks: Sequence[int], hashes: Sequence[bytes], *, start: int, salt: str, now_s: float
    ) -> None:
        """Make a sequence's blocks from ``start`` on findable for sequences of the partition."""
        if len(blocks):
            self._of(blocks).register_chain(blocks, hashes, start=start, salt=salt, now_s=now_s)

    def reset_cache(self) -> int:
        """Forget every hash and free every cached block; returns how many were freed."""
        return sum(part.reset_cache() for part in self._parts)

    def exchange(self, sources: Int32Array, targets: Int32Array) -> None:
        """Rename used blocks of one partition."""
        self._of(sources).exchange(sources, targets)

    def inspect(self) -> BlockSnapshot:
        """Return a copy of what is kept here; the free blocks of each partition follow each other."""
        found = [part.inspect() for part in self._parts]
        return BlockSnapshot(
            num_blocks=self.num_blocks,
            num_used=self.num_used,
            num_cached=self.num_cached,
            num_free=self.num_free,
            free=tuple(block for one in found for block in one.free),
            cached=frozenset().union(*(one.cached for one in found)),
            ref_counts=tuple(self.ref_counts.tolist()),
            hashes={block: block_hash for one in found for block, block_hash in one.hashes.items()},
            previous={block_hash: before for one in found for block_hash, before in one.previous.items()},
        )

    def _of(self, blocks: Sequence[int] | Int32Array) -> BlockManager:
        return self._parts[int(blocks[0]) // self._parts[0].num_blocks]
