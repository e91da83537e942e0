"""The read-only view that scheduling policies are given."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from trencadis.engine.prefix_index import PrefixIndex
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


class ViewMaker:
    """Makes a :class:`SchedulerView` of a state; the columns are wrapped once and again only when the table grew.

    Args:
        state: The engine's state.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._prefixes = PrefixIndex(state)
        self._version = -1
        self._columns: dict[str, Any] = {}

    def view(self) -> SchedulerView:
        """Return a view of the state as it is now. O(1)."""
        state = self._state
        if self._version != state.table.version:
            self._version = state.table.version
            self._columns = {name: read_only(getattr(state.table, name)) for name in _COLUMNS}
        return SchedulerView(
            now_s=state.clock.now_s(),
            waiting=state.waiting.slots,
            running=read_only(state.running),
            num_free_rows=state.rows.num_free,
            num_free_blocks=state.blocks.num_available,
            num_total_blocks=state.blocks.num_blocks,
            block_size=state.block_size,
            num_swapped=state.swapping.num_swapped,
            num_free_host_blocks=state.swapping.num_free,
            prefix_tokens=self._prefix_tokens,
            **self._columns,
        )

    def _prefix_tokens(self, slots: Int32Array) -> Int64Array:
        if not self._state.prefix_caching:
            return np.zeros(len(slots), np.int64)
        return self._prefixes.num_blocks(slots) * self._state.block_size
