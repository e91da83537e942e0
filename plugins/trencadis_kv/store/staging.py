"""Staging memory for blocks that wait to be saved, allocated once and reused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Staging", "runs"]


class Staging:
    """Slots of one block each. From any thread, once open.

    The slot that was freed last is taken first: memory that was touched is cheaper than new memory.

    Args:
        max_bytes: Maximum bytes of all slots.

    Attributes:
        num_slots: Number of slots; 0 before :meth:`open` and after :meth:`close`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._memory: NDArray[np.uint8] = np.empty((0, 1), np.uint8)
        self._given_back: list[int] = []
        self._num_touched = 0
        self.num_slots = 0

    def open(self, block_bytes: int) -> None:
        """Allocate the memory; unused slots cost nothing, since pages are mapped on first use.

        Args:
            block_bytes: Bytes per slot.
        """
        self.num_slots = self._max_bytes // block_bytes
        self._memory = np.empty((self.num_slots, block_bytes), np.uint8)

    def close(self) -> None:
        """Free the memory as soon as it is not read any more; no slots afterwards. May be called twice."""
        with self._lock:
            self.num_slots = 0
            self._num_touched = self._num_taken
            self._given_back = []
            self._memory = self._memory[:0].copy()

    @property
    def num_bytes(self) -> int:
        """Bytes of used slots."""
        return self._num_taken * int(self._memory.shape[1])

    @property
    def fraction(self) -> float:
        """Share of slots in use, 0 .. 1."""
        return self._num_taken / self.num_slots if self.num_slots else 1.0

    def take(self, number: int) -> list[int]:
        """Return free slots; none if there are too few."""
        with self._lock:
            if number > self.num_slots - self._num_taken:
                return []
            num_again = min(number, len(self._given_back))
            again = self._given_back[len(self._given_back) - num_again :][::-1]
            del self._given_back[len(self._given_back) - num_again :]
            first, self._num_touched = self._num_touched, self._num_touched + number - num_again
            return [*again, *range(first, self._num_touched)]

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots; their content may be overwritten."""
        with self._lock:
            self._given_back.extend(reversed(slots))

    def rows(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return a view of the slots ``first`` to ``last - 1``, ``[number, block_bytes]``."""
        return self._memory[first:last]

    @property
    def _num_taken(self) -> int:
        return self._num_touched - len(self._given_back)


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(index, first, last)`` of each run of consecutive slots: ``slots[index:]`` begins with ``first .. last - 1``. Pure."""
    start = 0
    for i in itertools.chain((i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), [len(slots)]):
        if i > start:
            yield start, slots[start], slots[start] + i - start
            start = i
