"""2Q: a FIFO queue for contents used once, an LRU queue for contents used again."""

from __future__ import annotations

from trencadis.interfaces import plain_state
from trencadis_gallery.config import TwoQueueConfig
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.history import History
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["TwoQueue"]


@plain_state
class TwoQueue(TrackingPolicy):
    """Evicts the oldest of the new contents, or the least recently used of the others. O(log n) a block.

        enter ──▶ new, by arrival ──▶ remembered        A content is proven when it comes back while it is remembered:
        enter, remembered ──▶ proven, by last use       uses in quick succession prove nothing.

    Source: Johnson and Shasha, "2Q", VLDB 1994, the full version.

    Args:
        config: Share of new contents, and length of the memory.
    """

    def __init__(self, config: TwoQueueConfig | None = None) -> None:
        super().__init__()
        self._config = config or TwoQueueConfig()
        self._arrival: dict[int, int] = {}
        self._num_arrivals = 0
        self._is_new: set[int] = set()
        self._new = Candidates()
        self._proven = Candidates()
        self._remembered: History[bool] = History()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Assign the content to a queue."""
        if not self._remembered.recall(key):
            self._is_new.add(block)

    def reuse(self, block: int) -> None:
        """Do nothing: contents of the LRU queue move when they become candidates."""

    def offer(self, block: int) -> None:
        """Append to the LRU queue, or add at the place of the first arrival."""
        if block not in self._is_new:
            self._proven.add(block)
            return
        if block not in self._arrival:
            self._num_arrivals += 1
            self._arrival[block] = self._num_arrivals
        self._new.add(block, self._arrival[block])

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._new.discard(block)
        self._proven.discard(block)

    def choose(self) -> int:
        """Return the first of the new contents while they exceed their share, else of the others."""
        too_many = len(self._is_new) > int(self._config.new_ratio * self.capacity)
        return (self._new if self._new and (too_many or not self._proven) else self._proven).take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Add a ghost entry for an evicted new content."""
        if evicted and block in self._is_new:
            self._remembered.remember(key, True, most=int(self._config.history * self.capacity))
        self._is_new.discard(block)
        self._arrival.pop(block, None)
