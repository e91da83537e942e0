"""A request inside the engine, and its state machine.

         add            admit                    stop, length
    ────────▶ WAITING ────────▶ RUNNING ────────────────────▶ finished (leaves the table)
       │       │   ▲ ▲             │                           ▲
       │       │   │ └─────────────┘ preempt                   │ abort or error, from every state
       │       ▼   │ resume                                    │
       └────▶  ASIDE  (a stage lets it wait) ──────────────────┘

Numbers that change every step live in the table's columns; what is touched rarely lives here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.errors import InternalError
from trencadis.interfaces.laws import law, of_type, tell_always
from trencadis.interfaces.restorable import Restorable
from trencadis.records import (
    BoolArray,
    FinishReason,
    FloatArray,
    Int32Array,
    Int64Array,
    Request,
    TableWrites,
    read_only,
)

__all__ = ["Claim", "Leaving", "Rows", "Sequence", "SequenceState", "SequenceTable", "SlotQueue", "When"]

_NONE = np.empty(0, np.int32)


class SequenceState(enum.IntEnum):
    """Where a live sequence is."""

    WAITING = 0
    ASIDE = 1
    RUNNING = 2


class When(enum.Enum):
    """When the KV of a claim can be read."""

    NOW = "now"  # by the next step
    AFTER_LOAD = "after load"  # the sequence waits aside until its stage resumes it
    PENDING = "pending"  # not known yet: the stage is asked again in a later plan, and in the next one if few wait so or nothing runs
    GONE = "gone"  # the sequence has ended


class Claim:
    """KV of the first tokens of a waiting sequence that is somewhere else than in the prefix cache.

    A stage returns one from its moments ``claim`` and ``leaving``. One that ``claim`` returned is begun, or unused and asked for again; one
    that is kept with a sequence, ``Sequence.claim``, is begun or dropped.

    Attributes:
        num_tokens: First tokens of the sequence whose KV it provides.
        when: When that KV can be read.
        blocks: Blocks for all the sequence's tokens, referenced once for it, of which the first are filled; None: it holds none.
        counts_as_cached: The claimed tokens count as found in a cache.
        is_provisional: Computed tokens do not count before the stage says that the KV came.
        reason: Why the sequence does not run now, in words.
    """

    num_tokens: int = 0
    when: When = When.NOW
    blocks: Int32Array | None = None
    counts_as_cached: bool = False
    is_provisional: bool = False
    reason: str = ""

    @law(of_type(bool), otherwise=False)
    def begin(self, sequence: Sequence, blocks: Int32Array, *, num_found: int) -> bool:
        """Bring the KV into the sequence's blocks; False if that cannot be begun: the sequence is not admitted, the blocks are freed.

        Args:
            sequence: It is being admitted, or set aside to be loaded.
            blocks: Blocks for all tokens of the sequence, int32 ``[n]``.
            num_found: Leading blocks that the prefix cache held.
        """
        return True

    @tell_always
    def unused(self) -> None:
        """The sequence was not admitted in this plan: forget the claim, and be ready to be asked again."""

    @tell_always
    def drop(self, sequence: Sequence) -> None:
        """Give up what is kept for a sequence that waits or stands aside: its tokens will be computed. ``blocks`` are released by the state."""


class Sequence:
    """What the engine keeps of one request beyond the table's columns.

    Attributes:
        request: The request.
        original_request: The same as it came, without what stages add.
        slot: The index in the table, for life.
        seed: Key of its random numbers.
        stop_token_ids: The model's end-of-sequence tokens, unless ignored, and the request's own stop tokens.
        tokens: Known tokens while it holds no row, int32; stale while it runs.
        block_hashes: Chained hashes of its full blocks so far, head first.
        claim: KV that is kept for it while it waits or stands aside; None: there is none, or its stage is asked again.
        part: Which of the engine's parts has its row and blocks, or had them when it was preempted.
        is_approximate: The KV it reads is near to what computing would give, not equal: nothing of it is shared or saved.
        num_approximate_tokens: Prompt tokens whose KV was such when it first ran; stays when it is computed anew.
        is_provisional: It runs with KV that has not come for sure: nothing that it computes is shared or kept.
        late_token_epoch: Residency whose token is still in flight after a preemption, or -1.
        num_cached_tokens: Prompt tokens that were cached, here or where its KV was loaded from, when it first ran; -1: it has not run.
        max_cached_tokens: The most that count as such, if another engine computed its prompt for it; else -1.
        first_scheduled_s: When it first ran, or was given a first token that another engine chose; or None.
        first_token_s: When its first token was committed, or None.
        num_failures: Failed steps it took part in since it last made progress.
    """

    __slots__ = (
        "block_hashes",
        "claim",
        "first_scheduled_s",
        "first_token_s",
        "is_approximate",
        "is_provisional",
        "late_token_epoch",
        "max_cached_tokens",
        "num_approximate_tokens",
        "num_cached_tokens",
        "num_failures",
        "original_request",
        "part",
        "request",
        "seed",
        "slot",
        "state",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        *,
        slot: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        original_request: Request | None = None,
    ) -> None:
        self.request = request
        self.original_request = original_request or request
        self.slot = slot
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.state = SequenceState.WAITING
        self.tokens: Int32Array = np.array(request.known_token_ids, np.int32)
        self.block_hashes: list[bytes] = []
        self.claim: Claim | None = None
        self.part = 0
        self.is_approximate = self.is_provisional = False
        self.num_approximate_tokens = 0
        self.late_token_epoch = -1
        self.num_cached_tokens = self.max_cached_tokens = -1
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_failures = 0


@attrs.define(kw_only=True, eq=False)
class Leaving:
    """How a sequence leaves its row, the queue or its place aside.

    Attributes:
        reason: Why it ends; None: it is preempted and waits.
        blocks: Blocks of a running sequence whose KV is valid, int32 ``[n]``: of the computed tokens of one that is preempted, of the known
            ones of one that ends. Empty if nothing of it can be trusted.
        is_complete: It ends with a text that is complete and whose KV can be shared.
        num_kept_blocks: Set it to keep the reference on so many first blocks, to be released later.
        transfer_params: Set it to what the engine that goes on with the request has to know.
        cost_s: Work for other sequences that was done in vain because of it, seconds.
    """

    reason: FinishReason | None = None
    blocks: Int32Array = _NONE
    is_complete: bool = False
    num_kept_blocks: int = 0
    transfer_params: Mapping[str, Any] | None = None
    cost_s: float = 0.0


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
)
_FLOAT_COLUMNS = (
    "arrival_s",
    "first_token_s",
    "waiting_since_s",
    "waited_s",
    "weight",
    "ttft_target_s",
    "tpot_target_s",
)
_BOOL_COLUMNS = ("checks_eos", "checks_own_stops")


class SequenceTable(Restorable):
    """The live sequences as a struct of arrays that grows by doubling.

    ``num_tokens`` counts tokens in flight, ``num_known_tokens`` only those whose ids the host has.
    ``num_computed_tokens`` counts tokens whose KV is computed or in flight, ``num_cached_tokens`` those it was admitted with.
    ``num_swapped_tokens`` counts tokens of a waiting sequence whose KV is in host memory.
    ``high_water`` is what had been computed before a preemption. ``first_token_s`` is infinite before the first token.
    ``waiting_since_s`` is when a sequence joined the queue, ``waited_s`` how long it waited until it ran, all times together. ``was_preempted`` is false as long as that is 0 everywhere.
    ``num_prompt_logprobs`` counts live sequences that asked for prompt logprobs. ``epoch`` changes with every residency and is unique over the life of the engine.
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
    arrival_s: FloatArray
    first_token_s: FloatArray
    waiting_since_s: FloatArray
    waited_s: FloatArray
    weight: FloatArray
    ttft_target_s: FloatArray
    tpot_target_s: FloatArray
    checks_eos: BoolArray
    checks_own_stops: BoolArray

    columns = (*_INT_COLUMNS, *_FLOAT_COLUMNS, *_BOOL_COLUMNS)
    """Names of the arrays."""
    restored = (*columns, "_free", "_next_epoch", "was_preempted", "num_prompt_logprobs")

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

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the columns of another table, and as many slots as it has."""
        super().restore_state(values)
        self.sequences.extend([None] * (len(self.row) - self.capacity))
        self.capacity = len(self.row)
        self.version += 1

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
        for name in self.columns:
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(added, old.dtype)]))
        self.sequences.extend([None] * added)
        self._free = list(range(capacity - 1, self.capacity - 1, -1)) + self._free
        self.capacity = capacity
        self.version += 1


_NO_WRITES = TableWrites(rows=_NONE, columns=_NONE, block_ids=_NONE)


class Rows(Restorable):
    """What the host mirrors of the device's rows: tokens and block tables, and the log of table writes.

    Attributes:
        tokens: int32 ``[max_num_seqs, max_model_len + 1]``; of a row the first ``num_known_tokens`` are valid.
        block_tables: int32 ``[max_num_seqs, max_blocks]``; of a row the first ``num_blocks`` are valid.
        num_free: Rows that can be taken.
        num_per_part: Part p has the rows from p times this number on.

    Args:
        num_rows: A multiple of the parts.
        max_model_len: Tokens.
        block_size: Tokens per block.
        num_parts: Parts of equal size; a sequence has its row and all its blocks in one.
    """

    restored = ("_free", "num_free")

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int, num_parts: int = 1) -> None:
        # np.empty leaves pages untouched until a sequence really grows that long.
        self.tokens: Int32Array = np.empty((num_rows, max_model_len + 1), np.int32)
        self.block_tables: Int32Array = np.empty((num_rows, -(-max_model_len // block_size) + 1), np.int32)
        size = self.num_per_part = num_rows // num_parts
        self._free = [list(range(first + size - 1, first - 1, -1)) for first in range(0, num_rows, size)]
        self.num_free = num_rows
        self._writes: list[tuple[Int32Array, Int32Array, Int32Array]] = []

    def num_free_in(self, part: int) -> int:
        """Return how many rows of a part can be taken. Pure."""
        return len(self._free[part])

    def take(self, part: int) -> int:
        """Return a free row of a part, the most recently used first."""
        self.num_free -= 1
        return self._free[part].pop()

    def give_back(self, row: int) -> None:
        """Free a row."""
        self.num_free += 1
        self._free[row // self.num_per_part].append(row)

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


class SlotQueue(Restorable):
    """Slots in order; append, push to the front, and remove. O(1) at the ends, O(n) in the middle.

    Attributes:
        slots: The slots, head first: a read-only view, valid until the next change.
        num_front: So many slots, at the head, were pushed to the front; those after them are in the order of ``append``.
        num_appended: Slots appended since the start.
        num_removed: Slots removed since the start.
    """

    restored = ("slots", "num_front", "num_appended", "num_removed")

    def __init__(self, capacity: int = 64) -> None:
        self._buffer: Int32Array = np.empty(capacity, np.int32)
        self._head = capacity // 2
        self._tail = self._head
        self.num_front = 0
        self.num_appended = self.num_removed = 0
        self._changed()

    def __len__(self) -> int:
        return self._tail - self._head

    def append(self, slot: int) -> None:
        """Add at the tail."""
        if self._tail == len(self._buffer):
            self._make_room()
        self._buffer[self._tail] = slot
        self._tail += 1
        self.num_appended += 1
        self._changed()

    def push_front(self, slot: int) -> None:
        """Add at the head."""
        if self._head == 0:
            self._make_room()
        self._head -= 1
        self._buffer[self._head] = slot
        self.num_front += 1
        self._changed()

    def remove(self, slot: int) -> bool:
        """Remove a slot wherever it is; False if it is not there."""
        if len(self) and self._buffer[self._head] == slot:
            self._head += 1
            self.num_removed += 1
            self.num_front = max(self.num_front - 1, 0)
            self._changed()
            return True
        hits = np.flatnonzero(self._buffer[self._head : self._tail] == slot)
        if not hits.size:
            return False
        self.num_removed += 1
        at = self._head + int(hits[0])
        self.num_front -= hits[0] < self.num_front
        self._buffer[at : self._tail - 1] = self._buffer[at + 1 : self._tail]
        self._tail -= 1
        self._changed()
        return True

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the slots of another queue."""
        self._buffer = values["slots"].copy()
        self._head, self._tail = 0, len(self._buffer)
        super().restore_state(values)
        self._changed()

    def _changed(self) -> None:
        self.slots = read_only(self._buffer[self._head : self._tail])

    def _make_room(self) -> None:
        old = self._buffer[self._head : self._tail]
        buffer = np.empty(max(64, 3 * len(old)), np.int32)
        head = (len(buffer) - len(old)) // 2
        buffer[head : head + len(old)] = old
        self._buffer, self._head, self._tail = buffer, head, head + len(old)
