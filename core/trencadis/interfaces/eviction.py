"""Contract of the noun ``eviction``: which unreferenced cached blocks go first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["INTERFACE_VERSION", "EvictionPolicy"]

INTERFACE_VERSION = 1


class EvictionPolicy(ABC):
    """Keeps the candidates for eviction: cached blocks that no sequence references. Engine thread.

    The core owns the cache, reference counts and hashes; it checks each victim. A block becomes a candidate by ``on_free``
    and stops being one by ``on_hit``, ``victims`` or ``forget``.
    """

    @abstractmethod
    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Take new candidates: blocks whose reference count fell to 0 and whose content stays cached.

        Args:
            blocks: Block ids, the tail of a sequence first: a block is useless without those before it.
            depths: Index of each within its sequence; larger is deeper.
            now_s: Engine clock, seconds.
        """

    @abstractmethod
    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Drop candidates that a sequence references again; blocks in chain order, head first."""

    @abstractmethod
    def victims(self, num_blocks: int) -> list[int]:
        """Remove and return the ``num_blocks`` candidates that go first; O(num_blocks log n).

        Args:
            num_blocks: 1 .. number of candidates.
        """

    @abstractmethod
    def forget(self, blocks: Sequence[int]) -> None:
        """Drop candidates that the core took away for another reason, such as a cache reset."""
