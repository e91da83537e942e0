"""Columns over stable slots: the numbers of every live sequence, and the rows of those that run.

A *slot* is given to a sequence when it is added and taken back when it ends. A *row* (0 .. max_num_seqs - 1) is
given when it is admitted and taken back when it is preempted or ends; the device keeps its state by row.
"""

from __future__ import annotations

import numpy as np

from trencadis.engine.sequence import Sequence
from trencadis.errors import InternalError
from trencadis.records import BoolArray, FloatArray, Int32Array, Int64Array, TableWrites

__all__ = ["Rows", "SequenceTable"]

_INT_COLUMNS = (
    "priority",
    "tenant",
    "num_prompt_tokens",
    "num_tokens",
    "num_known_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_swapped_tokens",
    "max_total_tokens",
    "min_total_tokens",
    "num_preemptions",
    "num_blocks",
    "num_hashed_blocks",
    "high_water",
    "row",
    "epoch",
    "adapter",
    "num_adapter_skips",
)
_FLOAT_COLUMNS = ("arrival_s", "first_token_s", "weight", "ttft_target_s", "tpot_target_s")
_BOOL_COLUMNS = ("checks_eos", "checks_own_stops")


class SequenceTable:
    """The live sequences as a struct of arrays that grows by doubling.

    ``num_tokens`` counts tokens in flight, ``num_known_tokens`` only those whose ids the host has.
    ``num_computed_tokens`` counts tokens whose KV is computed or in flight, ``num_cached_tokens`` those it was admitted with.
    ``num_swapped_tokens`` counts tokens of a waiting sequence whose KV is in host memory.
    ``high_water`` is what had been computed before a preemption. ``first_token_s`` is infinite before the first token. ``was_preempted`` is false as long as that is 0 everywhere.
    ``num_prompt_logprobs`` counts live sequences that asked for prompt logprobs. ``epoch`` changes with every residency and is unique over the life of the engine. ``adapter`` is the number of a LoRA adapter, 0 for none; ``num_adapter_skips`` counts plans that passed a waiting sequence over for it.
    """

    priority: Int64Array
    tenant: Int64Array
    num_prompt_tokens: Int64Array
    num_tokens: Int64Array
    num_known_tokens: Int64Array
    num_computed_tokens: Int64Array
    num_cached_tokens: Int64Array
    num_swapped_tokens: Int64Array
    max_total_tokens: Int64Array
    min_total_tokens: Int64Array
    num_preemptions: Int64Array
    num_blocks: Int64Array
    num_hashed_blocks: Int64Array
    high_water: Int64Array
    row: Int64Array
    epoch: Int64Array
    adapter: Int64Array
    num_adapter_skips: Int64Array
    arrival_s: FloatArray
    first_token_s: FloatArray
    weight: FloatArray
    ttft_target_s: FloatArray
    tpot_target_s: FloatArray
    checks_eos: BoolArray
    checks_own_stops: BoolArray

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = 0
        for names, dtype in ((_INT_COLUMNS, np.int64), (_FLOAT_COLUMNS, np.float64), (_BOOL_COLUMNS, np.bool_)):
            for name in names:
                setattr(self, name, np.zeros(0, dtype))
        self.sequences: list[Sequence | None] = []
        self._free: list[int] = []
        self._next_epoch = 0
        self.version = 0
        self.was_preempted = False
        self.num_prompt_logprobs = 0
        self._grow(capacity)

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def take_slot(self) -> int:
        """Return a free slot, all columns at their start; the lowest first, so that runs replay."""
        if not self._free:
            self._grow(self.capacity * 2)
        slot = self._free.pop()
        for name in _INT_COLUMNS:
            getattr(self, name)[slot] = 0
        for name in _FLOAT_COLUMNS:
            getattr(self, name)[slot] = 0.0
        self.row[slot] = -1
        self.first_token_s[slot] = np.inf
        self.new_epoch(slot)
        return slot

    def give_back_slot(self, slot: int) -> None:
        """Free a slot; results in flight for it no longer apply."""
        self.sequences[slot] = None
        self.new_epoch(slot)
        self._free.append(slot)

    def new_epoch(self, slot: int) -> None:
        """Mark that results planned so far no longer apply to this slot."""
        self._next_epoch += 1
        self.epoch[slot] = self._next_epoch

    def sequence(self, slot: int) -> Sequence:
        """Return the live sequence of a slot.

        Raises:
            InternalError: The slot is free.
        """
        sequence = self.sequences[slot]
        if sequence is None:
            raise InternalError(f"slot {slot} holds no sequence")
        return sequence

    def _grow(self, capacity: int) -> None:
        added = capacity - self.capacity
        for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS, *_BOOL_COLUMNS):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(added, old.dtype)]))
        self.sequences.extend([None] * added)
        self._free = list(range(capacity - 1, self.capacity - 1, -1)) + self._free
        self.capacity = capacity
        self.version += 1


_NONE = np.empty(0, np.int32)
_NO_WRITES = TableWrites(rows=_NONE, columns=_NONE, block_ids=_NONE)


class Rows:
    """What the host mirrors of the device's rows: tokens and block tables, and the log of table writes.

    Attributes:
        tokens: int32 ``[max_num_seqs, max_model_len + 1]``; of a row the first ``num_known_tokens`` are valid.
        block_tables: int32 ``[max_num_seqs, max_blocks]``; of a row the first ``num_blocks`` are valid.
    """

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int) -> None:
        # np.empty leaves pages untouched until a sequence really grows that long.
        self.tokens: Int32Array = np.empty((num_rows, max_model_len + 1), np.int32)
        self.block_tables: Int32Array = np.empty((num_rows, -(-max_model_len // block_size) + 1), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self._writes: list[tuple[Int32Array, Int32Array, Int32Array]] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Return a free row, the most recently used first."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Free a row."""
        self._free.append(row)

    def write_blocks(self, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        """Set block-table entries here, and on the device with the next batch."""
        self.block_tables[rows, columns] = block_ids
        self._writes.append((rows, columns, block_ids))

    def take_writes(self) -> TableWrites:
        """Return the table writes since the last call, in order."""
        writes, self._writes = self._writes, []
        if not writes:
            return _NO_WRITES
        if len(writes) == 1:
            rows, columns, block_ids = writes[0]
        else:
            rows, columns, block_ids = (np.concatenate(part) for part in zip(*writes, strict=True))
        return TableWrites(rows=rows, columns=columns, block_ids=block_ids)
