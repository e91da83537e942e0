"""How much of each waiting prompt the prefix cache holds, without looking everybody up in every step."""

from __future__ import annotations

import numpy as np

from trencadis.engine.state import EngineState
from trencadis.records import Int32Array, Int64Array

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Remembers the hits of waiting sequences, and looks one up again only when its hit may have changed.

    A hit grows only when the first block that it lacks becomes findable, and shrinks only together with its last block, since a block
    that is lost takes all behind it along. So two hashes are watched for each sequence, and the cache says which ones change. Before the
    first question nothing is watched.

    Args:
        state: The engine's state, read only but for who is told of its cache's changes.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._watchers: dict[bytes, list[int]] = {}  # slots by hash
        self._num_watches = 0
        self._forget(0)

    def num_blocks(self, slots: Int32Array) -> Int64Array:
        """Return how many leading blocks of each waiting sequence are cached, int64 as long as ``slots``.

        About 20 ns each, and some microseconds for each whose hit may have changed.
        """
        state, table = self._state, self._state.table
        if state.blocks.on_change is None:
            state.blocks.on_change = self._changed
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
