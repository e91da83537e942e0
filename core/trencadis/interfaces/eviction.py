"""Contract of the noun ``eviction``: which unreferenced cached blocks go first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, law, tell

__all__ = ["INTERFACE_VERSION", "STABILITY", "EvictionPolicy"]

INTERFACE_VERSION = 1
STABILITY = "stable"


def _distinct(method: str, answer: Any, number: int) -> Any:
    if len(answer) != number or len(set(answer)) != number:
        raise ContractError(f"{method}({number}) returned {shown(answer)}; they must be {number} different candidates")
    if not all(isinstance(one, int | np.integer) for one in answer):
        raise ContractError(f"{method}() returned {shown(answer)}")
    return answer


class EvictionPolicy(ABC):
    """Keeps the candidates for eviction: cached blocks that no sequence references. Engine thread.

    The core owns the cache, reference counts and hashes; it checks each victim. A block becomes a candidate by ``on_free``
    and stops being one by ``on_hit``, ``victims`` or ``forget``. ``on_hit`` and ``forget`` name candidates only, ``on_free``
    none, each block once in a call; a call may name no block.

    A block id stands for one content from ``on_use`` on until the block is evicted or forgotten, even if the core moves
    the content elsewhere. A block whose predecessor is evicted can no longer be found: the core takes its candidates
    away with it, by ``forget``.

    A call may take ``[budget] eviction_ms``. A policy that takes longer three times within a minute, or once ten times as long, is
    replaced by its fallback.
    """

    @tell  # noqa: B027 - optional
    def on_use(
        self, blocks: Sequence[int], *, keys: Sequence[bytes], depths: Sequence[int], salt: str, now_s: float
    ) -> None:
        """Learn what blocks hold, each time a sequence computes or finds their content. Optional.

        Called after ``on_hit`` of the same blocks. It says nothing about candidates: the blocks are in use.

        Args:
            blocks: Block ids in chain order, head first; part of one sequence.
            keys: Identity of each block's content and all before it: equal content that comes back later, maybe in another
                block, has the same key.
            depths: Index of each within its sequence.
            salt: The cache salt of the sequence; equal keys have equal salts.
            now_s: Engine clock, seconds.
        """

    @abstractmethod
    @tell
    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Take new candidates: blocks whose reference count fell to 0 and whose content stays cached.

        Args:
            blocks: Block ids, the tail of a sequence first: a block is useless without those before it.
            depths: Index of each within its sequence; larger is deeper.
            now_s: Engine clock, seconds.
        """

    @abstractmethod
    @tell
    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Drop candidates that a sequence references again; blocks in chain order, head first."""

    @abstractmethod
    @law(Law("``num_blocks`` different candidates", _distinct, ("num_blocks",)), opens=True)
    def victims(self, num_blocks: int) -> list[int]:
        """Remove and return the ``num_blocks`` candidates that go first; O(num_blocks log n).

        Args:
            num_blocks: 1 .. number of candidates.
        """

    @abstractmethod
    @tell
    def forget(self, blocks: Sequence[int]) -> None:
        """Drop candidates that the core took away for another reason, such as a cache reset."""
