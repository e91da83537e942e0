"""Per-slot memory of a policy: one number for each sequence."""

from __future__ import annotations

import numpy as np

from trencadis.records import FloatArray, Int32Array

__all__ = ["SlotColumn"]


class SlotColumn:
    """A number for each slot, 0 until one is set; grows by doubling.

    Args:
        capacity: Slots to begin with.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._values: FloatArray = np.zeros(capacity)

    def __getitem__(self, slot: int) -> float:
        return float(self._values[slot]) if slot < len(self._values) else 0.0

    def __setitem__(self, slot: int, value: float) -> None:
        self._reach(slot)
        self._values[slot] = value

    def of(self, slots: Int32Array) -> FloatArray:
        """Return the numbers of some slots, a copy, float64 as long as ``slots``."""
        if slots.size:
            self._reach(int(slots.max()))
        return self._values[slots]

    def set_all(self, slots: Int32Array, values: FloatArray | float) -> None:
        """Set the numbers of some slots.

        Args:
            slots: int32, each at most once.
            values: One value for each of ``slots``, or one for all.
        """
        if slots.size:
            self._reach(int(slots.max()))
            self._values[slots] = values

    def add(self, slots: Int32Array, values: FloatArray) -> None:
        """Add to the numbers of some slots; one that occurs several times gets all of it.

        Args:
            slots: int32.
            values: One value for each of ``slots``.
        """
        if slots.size:
            self._reach(int(slots.max()))
            np.add.at(self._values, slots, values)

    def _reach(self, slot: int) -> None:
        if slot >= len(self._values):
            grown = np.zeros(max(slot + 1, 2 * len(self._values)))
            grown[: len(self._values)] = self._values
            self._values = grown
