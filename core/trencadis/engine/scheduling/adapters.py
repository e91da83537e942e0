"""LoRA adapters: how many different ones may run at once, and whose turn is next.

A waiting sequence whose adapter has no place is skipped, and those after it are not blocked. Adapters in steady use would starve
the others so: a sequence skipped often enough gets the next place reserved, and if none becomes free by itself, the adapter with the
fewest sequences takes in no more. An adapter keeps its place until the last running sequence that uses it has left its row.
The model itself is adapter 0 and takes no place.
"""

from __future__ import annotations

import numpy as np

from trencadis.engine.restorable import Restorable
from trencadis.engine.sequences import SequenceTable
from trencadis.errors import InvalidRequestError
from trencadis.records import BoolArray, Int32Array

__all__ = ["AdapterPlaces"]

_NOBODY = -1


class AdapterPlaces(Restorable):
    """The places of adapters among running sequences.

    Args:
        table: Has the columns ``adapter`` and ``num_adapter_skips``.
        num_places: Different adapters that may run at once; 0: no request may name one.
        max_skips: Plans in which a sequence may be passed over before a place is reserved for its adapter.

    Source: Trencadís; the rule "skip, never block" is vLLM's.
    """

    restored = ("_numbers", "_num_users", "_reserved_for", "_closed")

    def __init__(self, table: SequenceTable, *, num_places: int, max_skips: int) -> None:
        self._table = table
        self._max_skips = max_skips
        self._numbers: dict[str, int] = {"": 0}
        self._num_users: dict[int, int] = {}  # running sequences by adapter
        self._reserved_for = self._closed = _NOBODY
        self.num_places = num_places

    @property
    def num_running(self) -> int:
        """Different adapters among running sequences."""
        return len(self._num_users)

    def number(self, adapter: str) -> int:
        """Return the number of an adapter; new names get new ones.

        Raises:
            InvalidRequestError: No request may name an adapter here.
        """
        if adapter and not self.num_places:
            raise InvalidRequestError(
                f"adapter = {adapter!r}: this engine runs no adapters ([engine] max_loras = 0).",
                hint="Leave it out, or raise engine.max_loras where the backend serves adapters.",
            )
        return self._numbers.setdefault(adapter, len(self._numbers))

    def enter(self, slot: int) -> None:
        """Say that a sequence takes a row."""
        adapter = int(self._table.adapter[slot])
        if adapter:
            self._num_users[adapter] = self._num_users.get(adapter, 0) + 1
            self._table.num_adapter_skips[slot] = 0
            if adapter == self._reserved_for:
                self._reserved_for = self._closed = _NOBODY

    def leave(self, slot: int) -> None:
        """Say that a sequence gives its row back."""
        adapter = int(self._table.adapter[slot])
        if adapter:
            self._num_users[adapter] -= 1
            if not self._num_users[adapter]:
                del self._num_users[adapter]

    def fits(self, slot: int) -> bool:
        """Return whether the adapter of a waiting sequence runs, or has a free place. Pure; O(1)."""
        adapter = int(self._table.adapter[slot])
        return not adapter or adapter in self._num_users or len(self._num_users) < self.num_places

    def has_turn(self, slot: int) -> bool:
        """Return whether a waiting sequence fits, and takes no place that is kept for another. Pure; O(1)."""
        adapter = int(self._table.adapter[slot])
        if not adapter:
            return True
        if adapter in self._num_users:
            return adapter != self._closed
        num_free = self.num_places - len(self._num_users)
        return num_free > (self._reserved_for not in (_NOBODY, adapter))

    def have_turns(self, slots: Int32Array) -> BoolArray:
        """Return :meth:`has_turn` of each slot, bool ``[len(slots)]``. Pure; O(n log n) as array operations."""
        adapters = self._table.adapter[slots]
        _, firsts, kinds = np.unique(adapters, return_index=True, return_inverse=True)
        answers = np.array([self.has_turn(slot) for slot in slots[firsts].tolist()], np.bool_)
        return answers[kinds]

    def passed_over(self, slots: Int32Array) -> None:
        """Count a skip of each waiting sequence that was passed over in a plan."""
        self._table.num_adapter_skips[slots] += 1

    def reserve(self, waiting: Int32Array) -> None:
        """Reserve the next place for the oldest sequence that was skipped too often; to be called before each plan's admissions.

        Args:
            waiting: Slots that wait.
        """
        overdue = waiting[self._table.num_adapter_skips[waiting] >= self._max_skips]
        if not overdue.size:
            self._reserved_for = self._closed = _NOBODY  # the sequence that it was for has gone
            return
        oldest = int(overdue[np.argmin(self._table.arrival_s[overdue])])
        adapter = int(self._table.adapter[oldest])
        if adapter != self._reserved_for:
            self._reserved_for, self._closed = adapter, _NOBODY
        if len(self._num_users) < self.num_places or adapter in self._num_users:
            self._closed = _NOBODY
        elif self._closed not in self._num_users:
            # The same one until it is empty: to close now this one, now that one would empty neither.
            self._closed = min(self._num_users, key=lambda one: (self._num_users[one], one))
