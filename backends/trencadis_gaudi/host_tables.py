"""Block tables on the host: the engine sends every entry, so block lists are made without asking the device."""

from __future__ import annotations

import numpy as np

from trencadis.records import Int32Array, TableWrites

__all__ = ["HostTables"]


class HostTables:
    """The block table of every row.

    Attributes:
        blocks: int32 ``[num_rows, num_columns]``; an entry that was never written is 0.

    Args:
        num_rows: Sequences at once.
        num_columns: Blocks of the longest sequence.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.blocks: Int32Array = np.zeros((num_rows, num_columns), np.int32)

    def apply(self, writes: TableWrites) -> None:
        """Take a batch's entries; of two for one place the later counts."""
        self.blocks[writes.rows, writes.columns] = writes.block_ids
