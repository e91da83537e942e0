"""Candidates for eviction, ordered by rank."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

__all__ = ["Candidates"]

_Entry = tuple[float, int, int]

_MIN_STALE = 64


class Candidates:
    """A set of blocks that returns the one of lowest rank; the oldest of equals.

    Adding and taking cost O(log n), dropping O(1): entries of dropped blocks stay in the heap until they come to its top, or
    until they are more than half of it.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._number_of: dict[int, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, block: int) -> bool:
        return block in self._number_of

    def add(self, block: int, rank: float = 0.0) -> None:
        """Add a block, or change its rank; without rank, blocks are returned in the order in which they were added."""
        number = next(self._numbers)
        self._number_of[block] = number
        heappush(self._heap, (rank, number, block))
        self._sweep()

    def discard(self, block: int) -> None:
        """Remove a block if it is there."""
        if self._number_of.pop(block, None) is not None:
            self._sweep()

    def lowest_rank(self) -> float:
        """Return the lowest rank.

        Raises:
            IndexError: There is none.
        """
        while not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0]

    def take(self) -> int:
        """Remove and return the block of lowest rank.

        Raises:
            IndexError: There is none.
        """
        self.lowest_rank()
        _, _, block = heappop(self._heap)
        del self._number_of[block]
        return block

    def _sweep(self) -> None:
        """Drop stale entries when they are the larger part, for amortised O(1)."""
        if len(self._heap) > 2 * len(self._number_of) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: _Entry) -> bool:
        return self._number_of.get(entry[2]) == entry[1]
