"""The read-only view that scheduling policies are given."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from trencadis.engine.sequences import SequenceTable
from trencadis.engine.state import EngineState
from trencadis.interfaces import SchedulerView
from trencadis.records import Int32Array, Int64Array, read_only

__all__ = ["PrefixIndex", "ViewMaker"]

_COLUMNS = tuple(
    field.name
    for field in attrs.fields(SchedulerView)
    if hasattr(SequenceTable, field.name) or field.name in SequenceTable.__annotations__
)


_new = object.__new__


class ViewMaker:
    """Makes a :class:`SchedulerView` of a state; what changes seldom is wrapped once, and again only when it is another array.

    Args:
        state: The engine's state.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._prefixes = PrefixIndex(state)
        self._version = -1
        self._lasting: dict[str, Any] = {}
        self._running: Int32Array | None = None

    def view(self) -> SchedulerView:
        """Return a view of the state as it is now. O(1)."""
        state = self._state
        if self._version != state.table.version or self._running is not state.running:
            self._wrap_columns()
        # A copy of fields that were set once: to set 25 of them in __init__ costs seven times as much.
        view = _new(SchedulerView)
        view.__dict__.update(
            self._lasting,
            now_s=state.clock.held_s,
            waiting=state.waiting.slots,
            num_free_rows=state.rows.num_free,
            num_free_blocks=state.blocks.num_available,
            **state.shown,
        )
        return view

    def _wrap_columns(self) -> None:
        """Wrap the columns of a table that grew, and who runs if that has changed."""
        state, table = self._state, self._state.table
        if self._version != table.version:
            self._version = table.version
            self._lasting = {name: read_only(getattr(table, name)) for name in _COLUMNS}
        self._running = state.running
        self._lasting = vars(
            SchedulerView(
                now_s=0.0,
                waiting=state.waiting.slots,
                running=read_only(state.running),
                num_free_rows=0,
                num_free_blocks=0,
                num_total_blocks=state.blocks.num_blocks,
                block_size=state.block_size,
                prefix_tokens=self._prefix_tokens,
                **{name: self._lasting[name] for name in _COLUMNS},
            )
        )

    def _prefix_tokens(self, slots: Int32Array) -> Int64Array:
        if not self._state.prefix_caching:
            return np.zeros(len(slots), np.int64)
        return self._prefixes.num_blocks(slots) * self._state.block_size


class PrefixIndex:
    """Remembers the hits of waiting sequences, and looks one up again only when its hit may have changed.

    A hit grows only when the first block that it lacks becomes findable, and shrinks only together with its last block, since a block
    that is lost takes all after it along. So two hashes are watched for each sequence, and the cache says which ones change. Before the
    first question nothing is watched.

    Args:
        state: The engine's state, read only but for who is told of its cache's changes.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._watchers: dict[bytes, list[int]] = {}  # slots by hash
        self._num_watches = 0
        self._is_told = False  # of changes; before the first question nothing is watched
        self._forget(0)

    def num_blocks(self, slots: Int32Array) -> Int64Array:
        """Return how many leading blocks of each waiting sequence are cached, int64 as long as ``slots``.

        About 20 ns each, and some microseconds for each whose hit may have changed.
        """
        state, table = self._state, self._state.table
        if not self._is_told:
            self._is_told = True
            state.blocks.on_change.append(self._changed)
        if len(self._hits) < table.capacity or self._num_watches > 8 * table.capacity:
            self._forget(table.capacity)
        is_known = (self._epochs[slots] == table.epoch[slots]) & (self._lengths[slots] == table.num_known_tokens[slots])
        if not is_known.all():
            for slot in slots[~is_known].tolist():
                self._look_up(slot)
        return self._hits[slots]

    def _look_up(self, slot: int) -> None:
        state, table = self._state, self._state.table
        sequence = table.sequence(slot)
        num_found = len(state.local_hit(sequence))
        self._hits[slot] = num_found
        self._epochs[slot], self._lengths[slot] = table.epoch[slot], table.num_known_tokens[slot]
        for block_hash in sequence.block_hashes[max(num_found - 1, 0) : num_found + 1]:
            self._watchers.setdefault(block_hash, []).append(slot)
            self._num_watches += 1

    def _changed(self, block_hash: bytes) -> None:
        """A block can be found from now on, or no longer."""
        slots = self._watchers.pop(block_hash, None)
        if slots is not None:
            self._epochs[slots] = -1

    def _forget(self, capacity: int) -> None:
        """Start again: watches of sequences that are gone are not looked for one by one."""
        self._watchers.clear()
        self._num_watches = 0
        self._hits: Int64Array = np.zeros(capacity, np.int64)
        self._lengths: Int64Array = np.zeros(capacity, np.int64)
        self._epochs: Int64Array = np.full(capacity, -1, np.int64)
