"""LRU with prefixes that are pinned for a time."""

from __future__ import annotations

from trencadis.interfaces import plain_state
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.config import TtlConfig
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["Ttl"]

_SEPARATORS = ("/", "\0")
"""After a caller's name in a cache salt: a user of it, and a salt of its own."""


@plain_state
class Ttl(TrackingPolicy):
    """Evicts the least recently used block; pinned ones only if no other is left, the next to expire first. O(log n) a block.

    The first ``pinned_blocks`` blocks of every sequence with a pinned salt are pinned until ``pinned_s`` after their last use. Contents
    of different salts are never shared, and a block is pinned together with all before it, so no prefix loses its beginning.

    Args:
        config: Rules for the blocks that are pinned, and durations.
    """

    def __init__(self, config: TtlConfig | None = None) -> None:
        super().__init__()
        self._config = config or TtlConfig()
        self._is_pinned: set[int] = set()
        self._plain = Candidates()
        self._pinned = Candidates()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Pin the block if its salt and depth are configured."""
        most = self._config.pinned_blocks
        if key and (not most or depth < most) and any(_names(name, salt) for name in self._config.pinned_salts):
            self._is_pinned.add(block)

    def reuse(self, block: int) -> None:
        """Do nothing: a block's time starts when it becomes a candidate."""

    def offer(self, block: int) -> None:
        """Append to its kind, pinned or not."""
        (self._pinned if block in self._is_pinned else self._plain).add(block, self.now_s)

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._plain.discard(block)
        self._pinned.discard(block)

    def choose(self) -> int:
        """Return the oldest candidate that is not pinned, or whose pin expired."""
        while self._pinned:
            freed_s = self._pinned.lowest_rank()
            if freed_s + self._config.pinned_s > self.now_s:
                break
            self._plain.add(self._pinned.take(), freed_s)
        return (self._plain or self._pinned).take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Drop the block's record."""
        self._is_pinned.discard(block)


def _names(name: str, salt: str) -> bool:
    return salt == name or any(salt.startswith(name + separator) for separator in _SEPARATORS)
