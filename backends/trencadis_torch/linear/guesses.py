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
from trencadis_torch.linear.structure import Ending

__all__ = ["GuessSteps"]


class GuessSteps:
    """State of a batch of guesses.

    Args:
        batch: The texts.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        block_size: Tokens per block.

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

    def __init__(self, batch: GuessBatch, tables: npt.NDArray[np.int32], block_size: int):
        lengths = batch.query_lens
        ends = np.cumsum(lengths)
        self._batch, self._tables, self._size = batch, tables, block_size
        self.columns = np.arange(int(ends[-1])) + np.repeat(batch.starts - (ends - lengths), lengths)
        self.lasts = (ends - 1).astype(np.int64)
        self.rows, self.starts, self._counts = np.array(
            [batch.rows, batch.starts + lengths, batch.num_guesses], np.int32
        )
        self.num_steps = int(batch.num_guesses.max())
        self.token_ids, self.positions, self.slots, self._columns = np.empty((4, len(lengths)), np.int64)
        self._columns[:] = np.arange(len(lengths))
        self._tokens = np.full((self.num_steps, len(lengths)), -1, np.int32)

    def slots_of_text(self) -> npt.NDArray[np.int64]:
        """Return where keys and values of the texts go, int64 ``[T]``."""
        rows = np.repeat(self._batch.rows, self._batch.query_lens)
        blocks: npt.NDArray[np.int64] = self._tables[rows, self.columns // self._size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * self._size + self.columns % self._size
        return slots

    def structure(self, vocab_size: int, ending: Ending) -> Guesses:
        """Return what the library reads; it refers to arrays of this object.

        Args:
            vocab_size: V.
            ending: Makes logits of what the output projection gives.
        """
        closed, fields = self._batch.closed, CALL.fields
        assert fields is not None, "a call is a record"
        return Guesses(
            tables=self._tables.ctypes.data,
            table_stride=self._tables.strides[0] // self._tables.itemsize,
            block_size=self._size,
            rows=self.rows.ctypes.data,
            starts=self.starts.ctypes.data,
            counts=self._counts.ctypes.data,
            columns=self._columns.ctypes.data,
            slots=self.slots.ctypes.data,
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            tokens=self._tokens.ctypes.data,
            closed=None if closed is None else closed.ctypes.data,
            num_sequences=len(self.rows),
            vocab_size=vocab_size,
            sequences_at=fields["num_sequences"][1],
            tokens_at=fields["num_tokens"][1],
            min_probability=self._batch.min_probability,
            scale=ending.factor / ending.divisor,
            softcap=ending.softcap or 0.0,
        )

    def found(self) -> Int32Array:
        """Return all guesses, int32 ``[B, G]``."""
        return self._tokens.T
