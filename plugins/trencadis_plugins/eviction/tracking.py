"""Base of policies that track contents as well as blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from trencadis.interfaces import EvictionPolicy

__all__ = ["TrackingPolicy"]


class TrackingPolicy(EvictionPolicy):
    """Translates the engine's calls to events of each content.

        enter ──▶ in use ──offer──▶ candidate ──choose──▶ leave (evicted)
                   │  ▲                │
              reuse└──┘◀───withdraw────┘──▶ leave (forgotten)

    A block that is offered without ever having been used enters with an empty key. A block that is used with another key has lost
    its content without a word, because a sequence held it when it became unreachable.

    Attributes:
        now_s: Time of the latest call, seconds on the engine clock.
        capacity: Contents that stay when the current call of ``victims`` is done: the size of the cache, blocks in use included.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.capacity = 0
        self._key_of: dict[int, bytes] = {}

    def on_use(
        self, blocks: Sequence[int], *, keys: Sequence[bytes], depths: Sequence[int], salt: str, now_s: float
    ) -> None:
        """Call :meth:`enter` for new contents, :meth:`reuse` for others."""
        self.now_s = now_s
        known = self._key_of
        for block, key, depth in zip(blocks, keys, depths, strict=True):
            if known.get(block) == key:
                self.reuse(block)
                continue
            if block in known:
                self._lose(block)
            known[block] = key
            self.enter(block, key, depth, salt)

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Make the blocks candidates, in the order given."""
        self.now_s = now_s
        for block, depth in zip(blocks, depths, strict=True):
            if block not in self._key_of:
                self._key_of[block] = b""
                self.enter(block, b"", depth, "")
            self.offer(block)

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Make the blocks candidates no more."""
        self.now_s = now_s
        for block in blocks:
            self.withdraw(block)

    def victims(self, num_blocks: int) -> list[int]:
        """Choose blocks one after the other."""
        self.capacity = len(self._key_of) - num_blocks
        chosen = []
        for _ in range(num_blocks):
            block = self.choose()
            self.leave(block, self._key_of.pop(block), evicted=True)
            chosen.append(block)
        return chosen

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the contents without ghost entries; unknown blocks are ignored."""
        for block in blocks:
            if block in self._key_of:
                self._lose(block)

    def _lose(self, block: int) -> None:
        self.withdraw(block)
        self.leave(block, self._key_of.pop(block), evicted=False)

    @abstractmethod
    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Called at a content's first use since it was last evicted, if ever."""

    @abstractmethod
    def reuse(self, block: int) -> None:
        """Called when a sequence found the content and uses it again."""

    @abstractmethod
    def offer(self, block: int) -> None:
        """Called when the block becomes a candidate, as the newest."""

    @abstractmethod
    def withdraw(self, block: int) -> None:
        """Called when the block is no candidate any more, if it was one."""

    @abstractmethod
    def choose(self) -> int:
        """Remove and return the candidate to evict. There is one."""

    @abstractmethod
    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Called when the content is gone: drop the block's record, or keep a ghost entry under its key (empty: unknown)."""
