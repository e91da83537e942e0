"""Greedy continuations of texts, several tokens in one call of ``decoder.cpp``: the arrays that it reads, and moves on step by step.

Shapes: B sequences, T tokens of their texts that are new, G most guesses of one, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trencadis.interfaces import GuessBatch
from trencadis.records import Int32Array
from trencadis_torch.attention.native import CALL
from trencadis_torch.linear.native_decoder import Guesses

__all__ = ["GuessSteps"]


class GuessSteps:
    """State of a batch of guesses.

    Args:
        batch: The texts.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        block_size: Tokens per block.
        order: Sequences by the number of their guesses, the largest first, ``[B]``. All arrays but those of the texts have this order.

    Attributes:
        columns: Position of each token of the texts, int64 ``[T]``.
        lasts: Index of the last token of each text among the T, ``[B]``.
        num_steps: G.
        rows: Row of each sequence, int32 ``[B]``, like ``starts``: where its newest token stands.
        starts: See ``rows``.
        token_ids: The newest token of each, int64 ``[B]``, like ``positions`` and ``slots`` of the same tokens.
        positions: See ``token_ids``.
        slots: See ``token_ids``.
    """

    def __init__(self, batch: GuessBatch, tables: npt.NDArray[np.int32], block_size: int, order: npt.NDArray[np.intp]):
        lengths = batch.query_lens
        ends = np.cumsum(lengths)
        self._batch, self._tables, self._size, self._order = batch, tables, block_size, order
        self.columns = np.arange(int(ends[-1])) + np.repeat(batch.starts - (ends - lengths), lengths)
        self.lasts = (ends - 1)[order].astype(np.int64)
        self.rows = np.ascontiguousarray(batch.rows[order], np.int32)
        self.starts = np.ascontiguousarray((batch.starts + lengths)[order], np.int32)
        self._counts = np.ascontiguousarray(batch.num_guesses[order], np.int32)
        self.num_steps = int(self._counts[0])
        self.token_ids, self.positions, self.slots = np.empty((3, len(order)), np.int64)
        self._tokens = np.zeros((self.num_steps, len(order)), np.int32)

    def slots_of_text(self) -> npt.NDArray[np.int64]:
        """Return where keys and values of the texts go, int64 ``[T]``."""
        rows = np.repeat(self._batch.rows, self._batch.query_lens)
        blocks: npt.NDArray[np.int64] = self._tables[rows, self.columns // self._size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * self._size + self.columns % self._size
        return slots

    def take_first(self, logits: npt.NDArray[np.float32]) -> None:
        """Choose the first guess of each sequence, from logits ``[B, V]``; they are overwritten."""
        if self._batch.closed is not None:
            logits[:, self._batch.closed] = -np.inf
        self._tokens[0] = self.token_ids[:] = logits.argmax(-1)

    def structure(self, vocab_size: int) -> Guesses:
        """Return what the library reads; it refers to arrays of this object."""
        closed, fields = self._batch.closed, CALL.fields
        assert fields is not None, "a call is a record"
        return Guesses(
            tables=self._tables.ctypes.data,
            table_stride=self._tables.strides[0] // self._tables.itemsize,
            block_size=self._size,
            rows=self.rows.ctypes.data,
            starts=self.starts.ctypes.data,
            counts=self._counts.ctypes.data,
            slots=self.slots.ctypes.data,
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            tokens=self._tokens.ctypes.data,
            closed=None if closed is None else closed.ctypes.data,
            num_sequences=len(self.rows),
            vocab_size=vocab_size,
            sequences_at=fields["num_sequences"][1],
            tokens_at=fields["num_tokens"][1],
        )

    def found(self) -> Int32Array:
        """Return all guesses in the order of the batch, int32 ``[B, G]``."""
        found = np.empty_like(self._tokens.T)
        found[self._order] = self._tokens.T
        return found
