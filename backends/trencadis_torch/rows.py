"""The rows' state on the device: tokens and block tables. A batch brings only what changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.interfaces import AllocationPlan, Sampler
from trencadis.records import Batch, Drafts, Int32Array, Pass, RowStart, TableWrites
from trencadis_torch.device import to_device

__all__ = ["DRAFT_MARGIN", "Rows", "drafts_of"]

DRAFT_MARGIN = 64
"""Columns after ``max_model_len``: drafts of a sequence about to end may reach beyond it."""


class Rows:
    """Tokens and block table of every row.

    Attributes:
        tokens: int32 ``[num_rows, max_model_len + 1 + DRAFT_MARGIN]`` on the device.
        tables: int32 ``[num_rows, max_blocks]`` on the device.
        prompt_logprobs: How many alternatives each row's prompt tokens are reported with, on the host.

    Args:
        plan: Sizes.
        device: Where.
    """

    def __init__(self, plan: AllocationPlan, device: torch.device) -> None:
        width = plan.max_model_len + 1 + DRAFT_MARGIN
        self.tokens = torch.zeros(plan.num_rows, width, dtype=torch.int32, device=device)
        self.tables = torch.zeros(plan.num_rows, -(-width // plan.block_size), dtype=torch.int32, device=device)
        self.prompt_logprobs = [0] * plan.num_rows
        self.history = self.tokens[:, : plan.max_model_len + 1]
        self._device = device

    def apply(self, batch: Batch, sampler: Sampler | None) -> None:
        """Take a batch's row starts, table writes, start tokens and drafts, in this order.

        Args:
            batch: With what changes.
            sampler: Starts rows as well; None: another rank samples.
        """
        self._start(batch.row_starts, sampler)
        self.write_tables(batch.table_writes)
        if len(batch.start_token_ids):
            for one in batch.passes:
                self._write_starts(one, batch.start_token_ids[one.indices])
        if batch.drafts is not None and len(batch.drafts.token_ids):
            for one in batch.passes:
                self._write_drafts(one, batch.drafts)

    def _start(self, starts: Sequence[RowStart], sampler: Sampler | None) -> None:
        for start in starts:
            self.tokens[start.row, : len(start.token_ids)] = to_device(start.token_ids, self._device)
            self.prompt_logprobs[start.row] = start.params.prompt_logprobs or 0
            if sampler is not None:
                sampler.start_row(start)

    def write_tables(self, writes: TableWrites) -> None:
        """Take new blocks of rows."""
        if not len(writes.rows):
            return
        if self._device.type == "cpu":
            self.tables.numpy()[writes.rows, writes.columns] = writes.block_ids  # of two to one entry the later counts
            return
        # Of two writes to one entry the later counts, and a scatter knows no order.
        keys = writes.rows.astype(np.int64) * self.tables.shape[1] + writes.columns
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        where = to_device(keys[last], self._device)
        self.tables.view(-1)[where] = to_device(writes.block_ids[last], self._device)

    def _write_starts(self, one: Pass, tokens: Int32Array) -> None:
        rows, columns = to_device(np.stack([one.rows, one.starts]).astype(np.int64), self._device)
        self.tokens[rows, columns] = to_device(tokens, self._device)

    def _write_drafts(self, one: Pass, drafts: Drafts) -> None:
        counts, tokens = drafts_of(drafts, one.indices)
        if not len(tokens):
            return
        firsts = one.starts + one.query_lens - counts
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        where = np.stack([np.repeat(one.rows, counts), np.repeat(firsts, counts) + within]).astype(np.int64)
        if self._device.type == "cpu":
            self.tokens.numpy()[where[0], where[1]] = tokens
            return
        rows, columns = to_device(where, self._device)
        self.tokens[rows, columns] = to_device(tokens, self._device)


def drafts_of(drafts: Drafts, indices: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return the number of drafts of some sequences of a plan, and their tokens one after another. Pure."""
    counts = drafts.num_drafts[indices]
    firsts = (np.cumsum(drafts.num_drafts) - drafts.num_drafts)[indices]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return counts, drafts.token_ids[np.repeat(firsts, counts) + within].astype(np.int32)
