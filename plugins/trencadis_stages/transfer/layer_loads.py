"""Layer-wise loads: the sequence runs while its KV is loaded; the step waits for each layer and counts only if the load succeeds.

    lookup ─▶ runs ─┬─ loaded, with the report of the same step ─▶ continues; its blocks enter the prefix cache
                    └─ failed, or no report ─▶ discarded: preempted, recomputed; blocks pinned as for any cancelled load

Until then no other sequence may use the sequence's blocks: neither hashed nor offered for saving. The load has a reference of its own on those
that it writes to, so that they stay when the sequence leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from trencadis.engine.sequences import Sequence
from trencadis.engine.state import EngineState
from trencadis.records import Int32Array

__all__ = ["LayerLoad", "LayerLoads"]


@attrs.frozen(kw_only=True, eq=False)
class LayerLoad:
    """One layer-wise load.

    Attributes:
        transfer_id: Id of the transfer.
        sequence: The sequence that runs beside it.
        blocks: Blocks that it writes to, int32 ``[n]``.
        first: Place of the first of them in the sequence; before it is a local hit.
        num_cached_tokens: Cached tokens that the sequence's answer states if the load does not come.
    """

    transfer_id: int
    sequence: Sequence
    blocks: Int32Array
    first: int
    num_cached_tokens: int


class LayerLoads:
    """The layer-wise loads of one engine, by transfer id; few, each for a step or two.

    Attributes:
        num_discarded: Sequences whose work was for nothing because their load did not come.
    """

    def __init__(self) -> None:
        self._loads: dict[int, LayerLoad] = {}
        self.num_discarded = 0

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[LayerLoad]:
        return iter(self._loads.values())

    def begin(
        self, transfer_id: int, sequence: Sequence, blocks: Int32Array, *, first: int, state: EngineState
    ) -> None:
        """Register a load whose sequence is about to be scheduled."""
        state.blocks.share(blocks)
        before = sequence.num_cached_tokens
        self._loads[transfer_id] = LayerLoad(
            transfer_id=transfer_id,
            sequence=sequence,
            blocks=blocks,
            first=first,
            num_cached_tokens=before
            if before >= 0
            else min(first * state.block_size, len(sequence.request.prompt_token_ids)),
        )

    def came(self, transfer_id: int, state: EngineState, *, too_late: bool) -> None:
        """Make the blocks of a finished load available to the prefix cache.

        Args:
            transfer_id: The load's id.
            state: The engine's state; changed.
            too_late: The step did not wait for them: its result is discarded.
        """
        load = self._loads.pop(transfer_id)
        sequence, now_s = load.sequence, state.clock.now_s()
        sequence.is_provisional = False
        if state.prefix_caching:
            state.blocks.register_chain(
                load.blocks.tolist(),
                sequence.block_hashes,
                start=load.first,
                salt=sequence.request.cache_salt,
                now_s=now_s,
            )
        state.blocks.release(load.blocks, now_s=now_s)
        if too_late:
            sequence.num_cached_tokens = load.num_cached_tokens
            self.discard(sequence, state)

    def drop(self, transfer_id: int) -> LayerLoad:
        """Remove a failed load; its reference on the blocks passes to the caller."""
        load = self._loads.pop(transfer_id)
        load.sequence.is_provisional = False
        if load.sequence.num_cached_tokens >= 0:
            load.sequence.num_cached_tokens = load.num_cached_tokens
        return load

    def discard(self, sequence: Sequence, state: EngineState) -> None:
        """Preempt a sequence; all its KV is recomputed."""
        self.num_discarded += 1
        state.preempt(sequence, kv_valid=False)

    def of(self, slots: Iterable[int]) -> list[LayerLoad]:
        """Return the loads beside which sequences among these slots run. Pure."""
        if not self._loads:
            return []
        planned = set(slots)
        return [load for load in self._loads.values() if load.sequence.slot in planned]

    def id_of(self, sequence: Sequence) -> int:
        """Return the id of the load beside which a sequence runs; -1: there is none. Pure."""
        return next((one for one, load in self._loads.items() if load.sequence is sequence), -1)
