"""Segmented LRU: blocks that were used again are evicted last."""

from __future__ import annotations

from trencadis.interfaces import plain_state
from trencadis_gallery.config import SlruConfig
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["Slru"]


@plain_state
class Slru(TrackingPolicy):
    """Evicts the oldest block on probation, protected ones only if there is no other. O(log n) a block.

        enter ──▶ probation ──used again──▶ protected        each from oldest to newest
                      ▲                        │
                      └── oldest, if too many ─┘

    Source: Karedla, Love and Wherry, IEEE Computer 27 (3), 1994.

    Args:
        config: From which use on a block is protected, and how many may be.
    """

    def __init__(self, config: SlruConfig | None = None) -> None:
        super().__init__()
        self._config = config or SlruConfig()
        self._num_uses: dict[int, int] = {}
        self._is_protected: set[int] = set()
        self._probation = Candidates()
        self._protected = Candidates()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Count the first use."""
        self._num_uses[block] = 0
        self.reuse(block)

    def reuse(self, block: int) -> None:
        """Count a use; after enough of them the block is protected."""
        self._num_uses[block] += 1
        if self._num_uses[block] >= self._config.protected_uses:
            self._is_protected.add(block)

    def offer(self, block: int) -> None:
        """Append to the block's segment."""
        (self._protected if block in self._is_protected else self._probation).add(block)

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._protected.discard(block)
        self._probation.discard(block)

    def choose(self) -> int:
        """Return the oldest candidate on probation."""
        while self._protected and len(self._is_protected) > self._config.protected_ratio * self.capacity:
            block = self._protected.take()
            self._is_protected.discard(block)
            self._probation.add(block)
        return (self._probation or self._protected).take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Drop the block's record."""
        del self._num_uses[block]
        self._is_protected.discard(block)
