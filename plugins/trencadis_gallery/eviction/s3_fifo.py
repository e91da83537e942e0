"""S3-FIFO: a small queue for new contents, a main queue with reinsertion, and ghost entries."""

from __future__ import annotations

from trencadis.interfaces import plain_state
from trencadis_gallery.config import S3FifoConfig
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.history import History
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["S3Fifo"]

_MAX_COUNT = 3
"""Largest value of the two-bit counter of uses."""

_PROMOTED = 2
"""Uses in the small queue that lead to the main queue."""


@plain_state
class S3Fifo(TrackingPolicy):
    """Evicts rarely used contents from the small queue, and those not used since their last turn from the main queue.

        enter ──▶ small ──used twice──▶ main ──┐ used: once more around
                    │                    ▲  ▲──┘
                    └▶ remembered ─enter─┘

    A block in use keeps its place. O(log n) a block, on average over the turns in the main queue, at most 3 for each use.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.

    Args:
        config: Share of the small queue, and length of the memory.
    """

    def __init__(self, config: S3FifoConfig | None = None) -> None:
        super().__init__()
        self._config = config or S3FifoConfig()
        self._count: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._num_places = 0
        self._is_small: set[int] = set()
        self._small = Candidates()
        self._main = Candidates()
        self._remembered: History[bool] = History()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Add to the small queue, or to the main one if there is a ghost entry."""
        self._count[block] = 0
        if not self._remembered.recall(key):
            self._is_small.add(block)

    def reuse(self, block: int) -> None:
        """Count a use, up to 3."""
        self._count[block] = min(_MAX_COUNT, self._count[block] + 1)

    def offer(self, block: int) -> None:
        """Add the candidate at the block's place, at first the end."""
        if block not in self._place:
            self._num_places += 1
            self._place[block] = self._num_places
        (self._small if block in self._is_small else self._main).add(block, self._place[block])

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._small.discard(block)
        self._main.discard(block)

    def choose(self) -> int:
        """Turn the queues until a block with too few uses comes up."""
        while True:
            too_many = len(self._is_small) > int(self._config.small_ratio * self.capacity)
            if self._small and (too_many or not self._main):
                block = self._small.take()
                if self._count[block] < _PROMOTED:
                    return block
                self._is_small.discard(block)
                self._requeue(block, 0)
                continue
            block = self._main.take()
            if not self._count[block]:
                return block
            self._requeue(block, self._count[block] - 1)

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Add a ghost entry for a content evicted from the small queue."""
        if evicted and block in self._is_small:
            self._remembered.remember(key, True, most=int(self._config.history * self.capacity))
        self._is_small.discard(block)
        self._place.pop(block, None)
        del self._count[block]

    def _requeue(self, block: int, count: int) -> None:
        self._count[block] = count
        del self._place[block]
        self.offer(block)
