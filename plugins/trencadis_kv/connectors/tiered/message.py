"""What the two sides of the tiered connector say to each other, and how they name transfer ids.

Every child counts transfer ids by itself. With ``n`` children, transfer id ``t`` of child ``i`` is called ``t * (n + 1) + i`` outside, so that
nobody keeps a table; the numbers of the class ``n`` name blocks that several children hold.
"""

from __future__ import annotations

import msgspec

__all__ = ["Hold", "Orders", "TransferIds"]


class Hold(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that several children hold: they are free when the last one releases them.

    Attributes:
        transfer_id: By which the engine knows them.
        members: The children's, as they are called outside.
    """

    transfer_id: int
    members: list[int]


class Orders(msgspec.Struct, array_like=True, frozen=True):
    """One step's message.

    Attributes:
        before: For each child, what is done first in all of them: blocks are saved before anybody may load into them.
        after: For each child, what follows: loads.
        loads: Transfer ids of loads that begin.
        releases: Transfer ids whose blocks are held until they are released: loads given up, blocks of finished sequences.
        holds: Blocks that several children hold.
        overdue: Of those, the transfer ids that whoever still holds them is to be closed for.
        close: Children to be closed.
    """

    before: list[bytes]
    after: list[bytes]
    loads: list[int] = []
    releases: list[int] = []
    holds: list[Hold] = []
    overdue: list[int] = []
    close: list[int] = []


class TransferIds:
    """Translates transfer ids. Pure.

    Args:
        num_children: Their number.
    """

    def __init__(self, num_children: int) -> None:
        self._num_classes = num_children + 1

    def outside(self, child: int, transfer_id: int) -> int:
        """Return what a child's transfer id is called outside."""
        return transfer_id * self._num_classes + child

    def shared(self, number: int) -> int:
        """Return the name of blocks that several children hold."""
        return number * self._num_classes + self._num_classes - 1

    def inside(self, transfer_id: int) -> tuple[int, int]:
        """Return the child, and what it calls the transfer id; the child is their number for blocks that several hold."""
        number, child = divmod(transfer_id, self._num_classes)
        return child, number
