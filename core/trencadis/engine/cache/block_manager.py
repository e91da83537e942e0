"""KV blocks: who holds which, which are free, which are kept for reuse.

    free ──allocate──▶ used ──release (no hash)──▶ free
                        │  ▲
          release (hash)│  │acquire (prefix hit)
                        ▼  │
                       cached ──evict──▶ used

At any time ``free + cached + used == num_blocks``. Only full blocks of committed tokens have a hash, and only those whose
predecessor has one: what no look-up can reach is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.errors import InternalError
from trencadis.records import Int32Array

__all__ = ["BlockManager", "BlockSnapshot", "Change"]

Change = tuple[str, int, Sequence[Any]]
"""A call that changed a :class:`BlockManager`: its method, how many blocks it was about, and its arguments; none is changed later."""


@attrs.frozen(kw_only=True)
class BlockSnapshot:
    """The KV blocks of the device.

    Attributes:
        num_blocks: All blocks; their ids are 0 to ``num_blocks - 1``.
        num_used: Blocks that sequences or stages hold.
        num_cached: Unreferenced blocks that are kept for reuse.
        num_free: Unreferenced blocks without content.
        free: Ids of the free blocks; the last is allocated first.
        cached: Ids of the cached blocks.
        ref_counts: References by block id, ``[num_blocks]``.
        hashes: Hash of the content by block id, for blocks that a prefix look-up finds.
        previous: Hash of the block before, by hash, for all but first blocks of a prompt.
    """

    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int
    free: tuple[int, ...]
    cached: frozenset[int]
    ref_counts: tuple[int, ...]
    hashes: Mapping[int, bytes]
    previous: Mapping[bytes, bytes]

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_free + self.num_cached


class BlockManager:
    """Reference counts, the free stack, and the map from hash to block.

    Args:
        num_blocks: Blocks first .. first + num_blocks - 1.
        eviction: Decides which cached blocks go first.
        first: The lowest id.
        ref_counts: References of all blocks of the engine, of which these are some; None: there are no others.

    Attributes:
        ref_counts: References of each block by its id, int32.
        eviction: The policy.
        num_free: Blocks whose content is not kept.
        num_available: Blocks that can be allocated now: free and cached ones.
        on_change: Each is called for every hash that becomes findable or ceases to be.
        journal: Called for each change, so that it can be made again elsewhere; None: nothing follows.
    """

    def __init__(
        self, *, num_blocks: int, eviction: GuardedEviction, first: int = 0, ref_counts: Int32Array | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.first = first
        self.ref_counts: Int32Array = np.zeros(first + num_blocks, np.int32) if ref_counts is None else ref_counts
        self._stack: Int32Array = np.arange(first + num_blocks - 1, first - 1, -1, dtype=np.int32)
        self.num_free = self.num_available = num_blocks
        self.on_change: list[Callable[[bytes], None]] = []
        self.journal: Callable[[Change], None] | None = None
        self._changed: list[bytes] | None = None
        self.eviction = eviction
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._depth_of: dict[int, int] = {}
        self._previous: dict[bytes, bytes] = {}
        # Nearly every block has one successor, its hash; several are in order, so that runs replay.
        self._successors: dict[bytes, bytes | dict[bytes, None]] = {}
        self._cached: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Blocks without references and that are kept for reuse."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that sequences or stages hold."""
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int) -> Int32Array:
        """Return ``num_blocks`` blocks with reference count 1, evicting cached ones if need be.

        Raises:
            InternalError: The caller did not check ``num_available``.
        """
        if num_blocks > self.num_available:
            raise InternalError(f"{num_blocks} blocks asked for, {self.num_available} available")
        evicts = num_blocks > self.num_free
        noted: list[Any] = [num_blocks]
        if (journal := self.journal) is not None:
            journal(("allocate", num_blocks, noted))
        if evicts:
            self._evict(num_blocks - self.num_free)
        blocks = self._stack[self.num_free - num_blocks : self.num_free][::-1].copy()
        self.num_free -= num_blocks
        self.num_available -= num_blocks
        self.ref_counts[blocks] = 1
        if evicts and journal is not None:
            noted.append(blocks.tolist())
        return blocks

    def longest_hit(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached or used blocks that hold the longest chain from the head. Pure."""
        return list(
            iter(map(self._block_of.get, hashes).__next__, None)
        )  # up to the first that is not there; in C code

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that have become findable since the last call, and those that have ceased to be; the first time, all."""
        if self._changed is None:
            self._changed = []
            self.on_change.append(self._changed.append)
            return list(self._block_of), []
        hashes = dict.fromkeys(self._changed)
        self._changed.clear()
        found = [one for one in hashes if one in self._block_of]
        return found, [one for one in hashes if one not in self._block_of]

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these blocks have no references: acquiring them makes as many fewer available. Pure."""
        return sum(map(self._cached.__contains__, blocks))

    def acquire(self, blocks: Sequence[int], *, now_s: float, salt: str = "") -> None:
        """Reference blocks of a prefix hit, in chain order, for a sequence of this cache salt."""
        if (journal := self.journal) is not None:
            journal(("acquire", len(blocks), (list(blocks), now_s, salt)))
        woken = [block for block in blocks if block in self._cached]
        if woken:
            self._cached.difference_update(woken)
            self.num_available -= len(woken)
            self.eviction.on_hit(woken, now_s=now_s)
        if self.eviction.wants_uses:
            self._tell_use(blocks, salt=salt, now_s=now_s)
        self.ref_counts[np.asarray(blocks, np.int32)] += 1

    def share(self, blocks: Int32Array) -> None:
        """Reference used blocks once more, for a holder that may outlast their sequence."""
        if (journal := self.journal) is not None:
            journal(("share", len(blocks), (blocks.copy(),)))
        self.ref_counts[blocks] += 1

    def release(self, blocks: Int32Array, *, now_s: float) -> None:
        """Drop one reference of each block, given in table order; blocks without references are freed or kept for reuse."""
        counts = self.ref_counts[blocks] - 1
        if counts.size and counts.min() < 0:
            raise InternalError(f"blocks {blocks[counts < 0].tolist()} released more often than acquired")
        if (journal := self.journal) is not None:
            journal(("release", len(blocks), (blocks.copy(), now_s)))
        self.ref_counts[blocks] = counts
        idle = blocks[counts == 0]
        hash_of = self._hash_of
        kept = [block for block in idle.tolist() if block in hash_of] if hash_of else []
        if kept:
            kept.reverse()  # the tail goes first: a block is useless without those before it
            self._cached.update(kept)
            self.num_available += len(kept)
            self.eviction.on_free(kept, depths=[self._depth_of[block] for block in kept], now_s=now_s)
            idle = np.array([block for block in idle.tolist() if block not in hash_of], np.int32)
        self.num_available += len(idle)
        self._push(idle)

    def register_chain(
        self, blocks: Sequence[int], hashes: Sequence[bytes], *, start: int, salt: str, now_s: float
    ) -> None:
        """Make a sequence's blocks from ``start`` on findable, unless their content is already or their predecessor is not.

        Args:
            blocks: Used, full, committed blocks ``start``, ``start + 1``, ... of the sequence.
            hashes: The sequence's hashes from its head on, at least ``start + len(blocks)``.
            start: Depth of the first block.
            salt: The sequence's cache salt.
            now_s: Engine clock, seconds.
        """
        own = hashes[start : start + len(blocks)]
        self._register_chain(list(blocks), own, hashes[start - 1] if start else b"", start, salt, now_s)

    def _register_chain(
        self, blocks: list[int], hashes: Sequence[bytes], previous: bytes, start: int, salt: str, now_s: float
    ) -> None:
        if start and previous not in self._block_of:
            return  # evicted under this sequence, which has a copy of its own
        if (journal := self.journal) is not None:
            journal(("_register_chain", len(blocks), (blocks, hashes, previous, start, salt, now_s)))
        known = []
        for depth, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True), start):
            if self._register(block, block_hash, depth):
                known.append(block)
                if depth:
                    self._succeed(previous, block_hash)
            previous = block_hash
        if known and self.eviction.wants_uses:
            self._tell_use(known, salt=salt, now_s=now_s)

    def _register(self, block: int, block_hash: bytes, depth: int) -> bool:
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._depth_of[block] = depth
        for call in self.on_change:
            call(block_hash)
        return True

    def reset_cache(self) -> int:
        """Forget every hash and free every cached block; returns how many were freed."""
        cached = sorted(self._cached)
        if (journal := self.journal) is not None:
            journal(("reset_cache", len(self._hash_of), ()))
        self.eviction.forget(cached)
        self._cached.clear()
        for call in self.on_change:
            for block_hash in self._block_of:
                call(block_hash)
        self._block_of.clear()
        self._hash_of.clear()
        self._depth_of.clear()
        self._previous.clear()
        self._successors.clear()
        self._push(np.array(cached, np.int32))
        return len(cached)

    def exchange(self, sources: Int32Array, targets: Int32Array) -> None:
        """Exchange the ids of blocks: hash, references and eviction record of each source go to its target, and back.

        Args:
            sources: Used blocks, int32 ``[n]``, none twice.
            targets: Blocks without references, free or cached, int32 ``[n]``, none twice.
        """
        counts = self.ref_counts
        if counts[targets].any() or not counts[sources].all():
            raise InternalError(f"blocks {sources.tolist()} cannot take the places of {targets.tolist()}")
        if (journal := self.journal) is not None:
            journal(("exchange", len(sources), (sources.copy(), targets.copy())))
        counts[targets], counts[sources] = counts[sources], 0
        to = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        pushed = np.arange(len(self.ref_counts), dtype=np.int32)
        pushed[targets] = sources
        self._stack[: self.num_free] = pushed[self._stack[: self.num_free]]
        moved = [block for block in to if block in self._cached]
        for target, source in to.items():
            self._exchange_hashes(source, target)
        self._cached.difference_update(moved)
        self._cached.update(to[block] for block in moved)
        self.eviction.exchange(to.items())

    @property
    def parts(self) -> Sequence[BlockManager]:
        """The parts that have blocks of their own: this one."""
        return (self,)

    def copy_state(self) -> dict[str, Any]:
        """Return copies of what is kept here; O(blocks), in C code."""
        return {
            "free": self._stack[: self.num_free].copy(),
            "num_available": self.num_available,
            "ref_counts": self.ref_counts[self.first : self.first + self.num_blocks].copy(),
            "hash_of": self._hash_of.copy(),
            "depth_of": self._depth_of.copy(),
            "previous": self._previous.copy(),
        }

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Hold and cache what another engine did; see :meth:`copy_state`."""
        self.num_free, self.num_available = len(values["free"]), values["num_available"]
        self._stack[: self.num_free] = values["free"]
        self.ref_counts[self.first : self.first + self.num_blocks] = values["ref_counts"]
        self._hash_of, self._depth_of = dict(values["hash_of"]), dict(values["depth_of"])
        self._block_of = {block_hash: block for block, block_hash in self._hash_of.items()}
        self._previous, self._successors = {}, {}
        for block_hash, previous in values["previous"].items():
            self._succeed(previous, block_hash)
        self._cached = {block for block in self._hash_of if not self.ref_counts[block]}

    def inspect(self) -> BlockSnapshot:
        """Return a copy of what is kept here, for tests and debuggers."""
        return BlockSnapshot(
            num_blocks=self.num_blocks,
            num_used=self.num_used,
            num_cached=self.num_cached,
            num_free=self.num_free,
            free=tuple(self._stack[: self.num_free].tolist()),
            cached=frozenset(self._cached),
            ref_counts=tuple(self.ref_counts.tolist()),
            hashes=dict(self._hash_of),
            previous=dict(self._previous),
        )

    def _exchange_hashes(self, source: int, target: int) -> None:
        for by_block in (self._hash_of, self._depth_of):
            values = {b: by_block.pop(a) for a, b in ((source, target), (target, source)) if a in by_block}
            by_block.update(values)  # type: ignore[arg-type]
        for block in (source, target):
            if block in self._hash_of:
                self._block_of[self._hash_of[block]] = block

    def _evict(self, num_blocks: int) -> None:
        """Free ``num_blocks`` blocks that the policy chooses, and with each what could only be found through it."""
        evicted = self.eviction.victims(num_blocks, candidates=self._cached)
        descendants = [block_hash for block in evicted for block_hash in self._lose(block)]
        unfit = []
        while descendants:
            block = self._block_of.get(descendants.pop(), -1)
            if block < 0:
                continue  # itself a victim
            descendants += self._lose(block)
            if self.ref_counts[block] == 0:  # else a sequence reads it, and frees it when it ends
                unfit.append(block)
        if unfit:
            self.eviction.forget(unfit)
        self._cached.difference_update(evicted, unfit)
        self._push(np.array(evicted + unfit, np.int32))

    def _lose(self, block: int) -> list[bytes]:
        """Make a block unfindable; returns the hashes of its successors."""
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash], self._depth_of[block]
        for call in self.on_change:
            call(block_hash)
        previous = self._previous.pop(block_hash, b"")
        siblings = self._successors.get(previous)
        if isinstance(siblings, dict):
            siblings.pop(block_hash, None)
        if not siblings or siblings == block_hash:
            self._successors.pop(previous, None)
        lost = self._successors.pop(block_hash, ())
        return [lost] if isinstance(lost, bytes) else list(lost)

    def _succeed(self, previous: bytes, block_hash: bytes) -> None:
        """Note which block a block comes after."""
        self._previous[block_hash] = previous
        known = self._successors.setdefault(previous, block_hash)
        if isinstance(known, dict):
            known[block_hash] = None
        elif known != block_hash:
            self._successors[previous] = {known: None, block_hash: None}

    def _tell_use(self, blocks: Sequence[int], *, salt: str, now_s: float) -> None:
        keys = [self._hash_of[block] for block in blocks]
        depths = [self._depth_of[block] for block in blocks]
        self.eviction.on_use(blocks, keys=keys, depths=depths, salt=salt, now_s=now_s)

    def _push(self, blocks: Int32Array) -> None:
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
