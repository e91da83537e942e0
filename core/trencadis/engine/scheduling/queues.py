"""The waiting queue: an array with room at both ends."""

from __future__ import annotations

import numpy as np

from trencadis.records import Int32Array, read_only

__all__ = ["SlotQueue"]


class SlotQueue:
    """Slots in order; append, push to the front, and remove. O(1) at the ends, O(n) in the middle.

    Attributes:
        num_front: So many slots, at the head, were pushed to the front; those behind them are in the order of ``append``.
        num_appended: Slots appended since the start.
        num_removed: Slots removed since the start.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._buffer: Int32Array = np.empty(capacity, np.int32)
        self._head = capacity // 2
        self._tail = self._head
        self.num_front = 0
        self.num_appended = self.num_removed = 0
        self._view: Int32Array | None = None

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def slots(self) -> Int32Array:
        """The slots, head first: a read-only view, valid until the next change."""
        if self._view is None:
            self._view = read_only(self._buffer[self._head : self._tail])
        return self._view

    def append(self, slot: int) -> None:
        """Add at the tail."""
        self._view = None
        if self._tail == len(self._buffer):
            self._make_room()
        self._buffer[self._tail] = slot
        self._tail += 1
        self.num_appended += 1

    def push_front(self, slot: int) -> None:
        """Add at the head."""
        self._view = None
        if self._head == 0:
            self._make_room()
        self._head -= 1
        self._buffer[self._head] = slot
        self.num_front += 1

    def remove(self, slot: int) -> bool:
        """Remove a slot wherever it is; False if it is not there."""
        self._view = None
        if len(self) and self._buffer[self._head] == slot:
            self._head += 1
            self.num_removed += 1
            self.num_front = max(self.num_front - 1, 0)
            return True
        hits = np.flatnonzero(self._buffer[self._head : self._tail] == slot)
        if not hits.size:
            return False
        self.num_removed += 1
        at = self._head + int(hits[0])
        self.num_front -= hits[0] < self.num_front
        self._buffer[at : self._tail - 1] = self._buffer[at + 1 : self._tail]
        self._tail -= 1
        return True

    def _make_room(self) -> None:
        old = self._buffer[self._head : self._tail]
        buffer = np.empty(max(64, 3 * len(old)), np.int32)
        head = (len(buffer) - len(old)) // 2
        buffer[head : head + len(old)] = old
        self._buffer, self._head, self._tail = buffer, head, head + len(old)
