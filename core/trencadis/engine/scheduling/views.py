"""The read-only view that scheduling policies are given."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from trencadis.engine.scheduling.prefix_index import PrefixIndex
from trencadis.engine.state import EngineState
from trencadis.engine.table import SequenceTable
from trencadis.interfaces import SchedulerView
from trencadis.records import Int32Array, Int64Array, read_only

__all__ = ["ViewMaker"]

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
            self._look_anew()
        # A copy of fields that were set once: to set 25 of them in __init__ costs seven times as much.
        view = _new(SchedulerView)
        view.__dict__.update(
            self._lasting,
            now_s=state.clock.now_s(),
            waiting=state.waiting.slots,
            num_free_rows=state.rows.num_free,
            num_free_blocks=state.blocks.num_available,
            num_swapped=state.swapping.num_swapped,
            num_free_host_blocks=state.swapping.num_free,
        )
        return view

    def _look_anew(self) -> None:
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
