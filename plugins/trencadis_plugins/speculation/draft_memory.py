"""Rows and blocks of a draft model's sequences, and the contents of its KV cache."""

from __future__ import annotations

import heapq

import attrs
import numpy as np

from trencadis.records import Int32Array, Request

__all__ = ["DraftMemory", "Held", "common_prefix"]


def common_prefix(first: Int32Array, second: Int32Array) -> int:
    """Return with how many tokens two runs begin alike. Pure."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size


@attrs.define(eq=False)
class Held:
    """A sequence's place.

    Attributes:
        slot: Slot of the sequence.
        request: Whose it is.
        row: Row of the draft model.
        tokens: Whose keys and values are there, int32.
        blocks: In order.
        num_written: Number of these blocks that the backend was told.
    """

    slot: int
    request: Request
    row: int
    tokens: Int32Array = attrs.field(factory=lambda: np.empty(0, np.int32))
    blocks: list[int] = attrs.field(factory=list)
    num_written: int = 0


class DraftMemory:
    """Gives out rows and blocks; the sequence not drafted for longest is evicted.

    Args:
        num_rows: Sequences at once.
        num_blocks: KV blocks 0 .. num_blocks - 1.
        block_size: Tokens per block.
    """

    def __init__(self, *, num_rows: int, num_blocks: int, block_size: int) -> None:
        self._rows = list(range(num_rows))
        self._blocks = list(range(num_blocks))
        self._size = block_size
        self._held: dict[int, Held] = {}
        self._busy: frozenset[int] = frozenset()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return len(self._blocks)

    def begin(self, slots: Int32Array) -> None:
        """Let none of these sequences give way until the next call."""
        self._busy = frozenset(slots.tolist())

    def hold(self, slot: int, request: Request) -> Held | None:
        """Return the place of a sequence, a fresh one if the slot was another request's; None if there is no row."""
        held = self._held.pop(slot, None)
        if held is not None and held.request is not request:
            self._give_back(held)
            held = None
        if held is None:
            if not self._rows and not self._make_room():
                return None
            held = Held(slot=slot, request=request, row=heapq.heappop(self._rows))
        self._held[slot] = held  # at the end: the others come first when somebody has to give way
        return held

    def reserve(self, held: Held, num_tokens: int) -> bool:
        """Give a sequence blocks for so many tokens; False, and nothing given, if there are not enough.

        The lowest go first: where blocks are read by range, that is the shortest.
        """
        missing = -(-num_tokens // self._size) - len(held.blocks)
        while missing > len(self._blocks):
            if not self._make_room():
                return False
        held.blocks.extend(heapq.heappop(self._blocks) for _ in range(missing))
        return True

    def forget(self, slot: int) -> None:
        """Take everything back from a sequence; it need not have anything."""
        held = self._held.pop(slot, None)
        if held is not None:
            self._give_back(held)

    def _make_room(self) -> bool:
        for slot in self._held:
            if slot not in self._busy:
                self.forget(slot)
                return True
        return False

    def _give_back(self, held: Held) -> None:
        heapq.heappush(self._rows, held.row)
        for block in held.blocks:
            heapq.heappush(self._blocks, block)
