"""The waiting queue: an array with room at both ends."""

from __future__ import annotations

import numpy as np

from trencadis.records import Int32Array

__all__ = ["SlotQueue"]


class SlotQueue:
    """Slots in order; append, push to the front, and remove. O(1) at the ends, O(n) in the middle."""

    def __init__(self, capacity: int = 64) -> None:
        self._buffer: Int32Array = np.empty(capacity, np.int32)
        self._head = capacity // 2
        self._tail = self._head

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def slots(self) -> Int32Array:
        """The slots, head first: a read-only view, valid until the next change."""
        view = self._buffer[self._head : self._tail]
        view.flags.writeable = False
        return view

    def append(self, slot: int) -> None:
        """Add at the tail."""
        if self._tail == len(self._buffer):
            self._make_room()
        self._buffer[self._tail] = slot
        self._tail += 1

    def push_front(self, slot: int) -> None:
        """Add at the head."""
        if self._head == 0:
            self._make_room()
        self._head -= 1
        self._buffer[self._head] = slot

    def remove(self, slot: int) -> bool:
        """Remove a slot wherever it is; False if it is not there."""
        if len(self) and self._buffer[self._head] == slot:
            self._head += 1
            return True
        hits = np.flatnonzero(self._buffer[self._head : self._tail] == slot)
        if not hits.size:
            return False
        at = self._head + int(hits[0])
        self._buffer[at : self._tail - 1] = self._buffer[at + 1 : self._tail]
        self._tail -= 1
        return True

    def _make_room(self) -> None:
        old = self._buffer[self._head : self._tail]
        buffer = np.empty(max(64, 3 * len(old)), np.int32)
        head = (len(buffer) - len(old)) // 2
        buffer[head : head + len(old)] = old
        self._buffer, self._head, self._tail = buffer, head, head + len(old)
