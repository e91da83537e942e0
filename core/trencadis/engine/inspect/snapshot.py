"""A copy of the engine's state for tests, conformance suites and debuggers; nothing in it changes when the engine goes on.

    Engine.inspect() ▶ EngineSnapshot ─┬─ sequences     SequenceSnapshot by request id
                                       ├─ blocks        BlockSnapshot: device KV blocks
                                       ├─ host_blocks   HostBlockSnapshot: blocks of swapped-out sequences
                                       └─ transfers     TransferSnapshot: KV loads in flight and pinned blocks

Taking one costs O(sequences + blocks); no step takes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from trencadis.records import Request

if TYPE_CHECKING:
    from trencadis.engine.sequences import Sequence
    from trencadis.engine.state import EngineState

__all__ = [
    "BlockSnapshot",
    "EngineSnapshot",
    "HostBlockSnapshot",
    "LoadSnapshot",
    "SequenceSnapshot",
    "TransferSnapshot",
    "take_snapshot",
]


@attrs.frozen(kw_only=True)
class SequenceSnapshot:
    """A live request.

    Attributes:
        request: The request, completed by its tenant's entry.
        slot: Index of the sequence, for life.
        state: ``compiling``, ``waiting``, ``waiting_for_remote_kv`` or ``running``.
        row: Device row; -1 unless it runs.
        num_prompt_tokens: Tokens of the prompt.
        num_tokens: Prompt and output tokens, those in flight included.
        num_known_tokens: Those whose ids the host has.
        num_computed_tokens: Those whose KV is computed or in flight; 0 unless it runs.
        num_preemptions: How often it was preempted.
        block_table: Device blocks of a running sequence, in order of its tokens.
        loaded_blocks: Device blocks of a waiting sequence whose KV load has ended, in order of its tokens.
        host_blocks: Host blocks of a swapped-out sequence, in order of its tokens.
        num_swapped_tokens: Tokens whose KV is in ``host_blocks``.
        transfer_id: The KV load that it waits for or runs beside; -1 without one.
    """

    request: Request
    slot: int
    state: str
    row: int
    num_prompt_tokens: int
    num_tokens: int
    num_known_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_table: tuple[int, ...]
    loaded_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    num_swapped_tokens: int
    transfer_id: int


@attrs.frozen(kw_only=True)
class BlockSnapshot:
    """The KV blocks of the device.

    Attributes:
        num_blocks: All blocks; their ids are 0 to ``num_blocks - 1``.
        num_used: Blocks that sequences or transfers hold.
        num_cached: Unreferenced blocks that are kept for reuse.
        num_free: Unreferenced blocks without content.
        free: Ids of the free blocks; the last is allocated first.
        cached: Ids of the cached blocks.
        ref_counts: References by block id, ``[num_blocks]``.
        hashes: Hash of the content by block id, for blocks that a prefix look-up finds.
        previous: Hash of the block before, by hash, for all but first blocks of a prompt.
    """

    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int
    free: tuple[int, ...]
    cached: frozenset[int]
    ref_counts: tuple[int, ...]
    hashes: Mapping[int, bytes]
    previous: Mapping[bytes, bytes]

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_free + self.num_cached


@attrs.frozen(kw_only=True)
class HostBlockSnapshot:
    """The KV blocks in host memory.

    Attributes:
        num_blocks: All blocks; 0 if preempted sequences are recomputed.
        num_swapped: Sequences that hold some.
        free: Ids of the free blocks; the last is taken first.
        copied_in: Ids of blocks that are copied to the device before the next step, and free after it.
    """

    num_blocks: int
    num_swapped: int
    free: tuple[int, ...]
    copied_in: tuple[int, ...]


@attrs.frozen(kw_only=True)
class LoadSnapshot:
    """A KV load in flight.

    Attributes:
        transfer_id: Its id.
        slot: Of the sequence that waits for it or runs beside it.
        blocks: Device blocks that the load holds, in order of the sequence's tokens.
        written: Those of them that the transfer may write to.
        layerwise: Whether the sequence runs beside the load, which comes layer by layer.
    """

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]
    written: tuple[int, ...]
    layerwise: bool


@attrs.frozen(kw_only=True)
class TransferSnapshot:
    """KV transfers in flight.

    Attributes:
        loads: Loads, in order of their start; those with a waiting sequence first.
        pinned: Device blocks that a transfer may use after its sequence left, by transfer id.
    """

    loads: tuple[LoadSnapshot, ...]
    pinned: Mapping[int, tuple[int, ...]]

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of ``pinned``."""
        return sum(map(len, self.pinned.values()))


@attrs.frozen(kw_only=True)
class EngineSnapshot:
    """The engine's state at one moment.

    Attributes:
        block_size: Tokens per block.
        max_model_len: Longest sequence, tokens.
        num_rows: Device rows: sequences that can run at once.
        num_free_rows: Rows without a sequence.
        sequences: Live sequences by request id, in order of arrival.
        waiting: Slots of the waiting queue, head first.
        running: Slots in the order in which they started to run.
        compiling: Slots that wait for their sampler.
        waiting_for_remote_kv: Slots that wait for a KV load, in order of its start.
        blocks: Device blocks.
        host_blocks: Host blocks.
        transfers: KV transfers.
        steps_in_flight: Numbers of the steps that were submitted and are not committed, oldest first.
        speculation_fault: Why speculation was switched off; empty if it was not.
    """

    block_size: int
    max_model_len: int
    num_rows: int
    num_free_rows: int
    sequences: Mapping[str, SequenceSnapshot]
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    compiling: frozenset[int]
    waiting_for_remote_kv: tuple[int, ...]
    blocks: BlockSnapshot
    host_blocks: HostBlockSnapshot
    transfers: TransferSnapshot
    steps_in_flight: tuple[int, ...]
    speculation_fault: str

    @property
    def by_slot(self) -> dict[int, SequenceSnapshot]:
        """Live sequences by slot."""
        return {sequence.slot: sequence for sequence in self.sequences.values()}


def take_snapshot(state: EngineState, *, steps_in_flight: Iterable[int], speculation_fault: str) -> EngineSnapshot:
    """Copy the state of an engine.

    Args:
        state: Of the engine; not changed.
        steps_in_flight: Numbers of the steps that were submitted and are not committed.
        speculation_fault: Why speculation was switched off; empty if it was not.
    """
    transfers = state.transfers.inspect()
    return EngineSnapshot(
        block_size=state.block_size,
        max_model_len=state.max_model_len,
        num_rows=len(state.rows.tokens),
        num_free_rows=state.rows.num_free,
        sequences={name: _sequence(state, state.table.sequence(slot)) for name, slot in state.slot_of.items()},
        waiting=tuple(state.waiting.slots.tolist()),
        running=tuple(state.running.tolist()),
        compiling=frozenset(state.compiling),
        waiting_for_remote_kv=tuple(load.slot for load in transfers.loads if not load.layerwise),
        blocks=state.blocks.inspect(),
        host_blocks=state.swapping.inspect(),
        transfers=transfers,
        steps_in_flight=tuple(steps_in_flight),
        speculation_fault=speculation_fault,
    )


_STATES = ("waiting", "waiting_for_remote_kv", "running", "compiling")
"""By the number of a ``SequenceState``."""


def _sequence(state: EngineState, sequence: Sequence) -> SequenceSnapshot:
    table, slot = state.table, sequence.slot
    loaded, hosted = sequence.loaded_blocks, sequence.host_blocks
    return SequenceSnapshot(
        request=sequence.request,
        slot=slot,
        state=_STATES[sequence.state],
        row=int(table.row[slot]),
        num_prompt_tokens=int(table.num_prompt_tokens[slot]),
        num_tokens=int(table.num_tokens[slot]),
        num_known_tokens=int(table.num_known_tokens[slot]),
        num_computed_tokens=int(table.num_computed_tokens[slot]),
        num_preemptions=int(table.num_preemptions[slot]),
        block_table=tuple(state.blocks_of(sequence).tolist()),
        loaded_blocks=() if loaded is None else tuple(loaded.tolist()),
        host_blocks=() if hosted is None else tuple(hosted.tolist()),
        num_swapped_tokens=int(table.num_swapped_tokens[slot]),
        transfer_id=sequence.transfer_id,
    )
