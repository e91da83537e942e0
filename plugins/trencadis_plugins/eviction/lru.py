"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from trencadis.interfaces import EvictionPolicy, plain_state

__all__ = ["Lru"]


@plain_state
class Lru(EvictionPolicy):
    """Evicts in the order in which blocks were freed, O(1) a block.

        on_free ──▶ [ oldest … newest ]        on_hit, forget: out of the middle
                      └──▶ victims

    A sequence frees its tail first, so its tail also goes first: what is left of a prompt is always its beginning,
    the part that other prompts can share.
    """

    def __init__(self) -> None:
        self._candidates: OrderedDict[int, None] = OrderedDict()

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Append the blocks as given, tail first."""
        for block in blocks:
            self._candidates[block] = None
            self._candidates.move_to_end(block)

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Remove the blocks; they are the newest when they are freed again."""
        self.forget(blocks)

    def victims(self, num_blocks: int) -> list[int]:
        """Remove and return the oldest candidates, oldest first."""
        return [self._candidates.popitem(last=False)[0] for _ in range(num_blocks)]

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the blocks; others than candidates are ignored."""
        for block in blocks:
            self._candidates.pop(block, None)
