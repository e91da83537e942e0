"""Tokens of rows on the device, written by operations with shapes independent of the batch, and block tables on the host."""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.interfaces import AllocationPlan, Sampler
from trencadis.records import Drafts, Int32Array, Pass, RowStart, TableWrites
from trencadis_gaudi.habana import Habana
from trencadis_torch.device import to_device
from trencadis_torch.rows import Rows, drafts_of

__all__ = ["DeviceRows", "HostTables"]


class DeviceRows(Rows):
    """Tokens of every row, and of one more row that padding writes to. Block tables stay on the host (:class:`HostTables`).

    Args:
        plan: Sizes of the allocation.
        habana: Device of the tokens.
    """

    def __init__(self, plan: AllocationPlan, habana: Habana) -> None:
        super().__init__(attrs.evolve(plan, num_rows=plan.num_rows + 1), habana.device)
        self._habana = habana
        self._padding_row = plan.num_rows
        self._flat = self.tokens.flatten()

    def start(self, start: RowStart, sampler: Sampler | None) -> None:
        """Start a sequence in a row; writes all columns, so that one shape serves every prompt.

        Args:
            start: Row, prompt and parameters of the sequence.
            sampler: Sampler to start the row in; None: another rank samples.
        """
        line = np.zeros((1, self.tokens.shape[1]), np.int32)
        line[0, : len(start.token_ids)] = start.token_ids
        row = np.array([start.row], np.int64)
        self.tokens.index_copy_(0, to_device(row, self._device), to_device(line, self._device))
        self._habana.mark_step()
        self.prompt_logprobs[start.row] = start.params.prompt_logprobs or 0
        if sampler is not None:
            sampler.start_row(start)

    def write_pass_drafts(self, one: Pass, drafts: Drafts | None) -> None:
        """Write the drafts of a pass after its rows' known tokens, padded to the token positions of the bucket."""
        bucket = one.bucket
        if bucket.query_len == 1:
            return
        places = np.full(bucket.num_tokens, self._padding_row * self.tokens.shape[1], np.int64)
        tokens = np.zeros(bucket.num_tokens, np.int32)
        if drafts is not None and len(drafts.token_ids):
            counts, found = drafts_of(drafts, one.indices)
            firsts = one.rows.astype(np.int64) * self.tokens.shape[1] + one.starts + one.query_lens - counts
            within = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
            places[: len(found)] = np.repeat(firsts, counts) + within
            tokens[: len(found)] = found
        self._flat.index_copy_(0, to_device(places, self._device), to_device(tokens, self._device))
        self._habana.mark_step()


class HostTables:
    """The block table of every row.

    Attributes:
        blocks: Block ids, int32 ``[num_rows, num_columns]``; unwritten entries are 0.

    Args:
        num_rows: Number of rows (concurrent sequences).
        num_columns: Blocks of the longest sequence.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.blocks: Int32Array = np.zeros((num_rows, num_columns), np.int32)

    def apply(self, writes: TableWrites) -> None:
        """Write a batch's entries; later ones override earlier ones at the same place."""
        self.blocks[writes.rows, writes.columns] = writes.block_ids
