"""A copy of the engine's state for tests, conformance suites and debuggers; nothing in it changes when the engine goes on.

    Engine.inspect() ▶ EngineSnapshot ─┬─ sequences     SequenceSnapshot by request id
                                       ├─ blocks        BlockSnapshot: device KV blocks
                                       └─ stages        what each stage shows of itself, by name

Taking one costs O(sequences + blocks); no step takes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trencadis.engine.cache.block_manager import BlockSnapshot
from trencadis.engine.sequences import Sequence
from trencadis.engine.stage import Stage
from trencadis.engine.state import EngineState
from trencadis.records import Request

__all__ = [
    "EngineSnapshot",
    "SequenceSnapshot",
    "take_snapshot",
]


@attrs.frozen(kw_only=True)
class SequenceSnapshot:
    """A live request.

    Attributes:
        request: The request, as stages completed it.
        slot: Index of the sequence, for life.
        state: ``waiting``, ``running``, or why it stands aside, such as ``loading``.
        row: Device row; -1 unless it runs.
        num_prompt_tokens: Tokens of the prompt.
        num_tokens: Prompt and output tokens, those in flight included.
        num_known_tokens: Those whose ids the host has.
        num_computed_tokens: Those whose KV is computed or in flight; 0 unless it runs.
        num_preemptions: How often it was preempted.
        block_table: Device blocks of a running sequence, in order of its tokens.
        claimed_blocks: Device blocks that are kept for a waiting sequence, in order of its tokens.
        num_claimed_tokens: Tokens of a waiting sequence whose KV a stage keeps.
        is_provisional: It runs with KV that has not come for sure.
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
    claimed_blocks: tuple[int, ...]
    num_claimed_tokens: int
    is_provisional: bool


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
        aside: Slots that stand aside, the first first, and why.
        blocks: Device blocks.
        stages: State that each stage shows, by name.
        steps_in_flight: Numbers of the steps that were submitted and are not committed, oldest first.
    """

    block_size: int
    max_model_len: int
    num_rows: int
    num_free_rows: int
    sequences: Mapping[str, SequenceSnapshot]
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    aside: Mapping[int, str]
    blocks: BlockSnapshot
    stages: Mapping[str, Any]
    steps_in_flight: tuple[int, ...]

    @property
    def by_slot(self) -> dict[int, SequenceSnapshot]:
        """Live sequences by slot."""
        return {sequence.slot: sequence for sequence in self.sequences.values()}


def take_snapshot(state: EngineState, *, steps_in_flight: Iterable[int], stages: Iterable[Stage]) -> EngineSnapshot:
    """Copy the state of an engine.

    Args:
        state: The engine's state; not changed.
        steps_in_flight: Numbers of the steps that were submitted and are not committed.
        stages: The engine's stages.
    """
    shown = {stage.name: stage.inspect() for stage in stages}
    return EngineSnapshot(
        block_size=state.block_size,
        max_model_len=state.max_model_len,
        num_rows=len(state.rows.tokens),
        num_free_rows=state.rows.num_free,
        sequences={name: _sequence(state, state.table.sequence(slot)) for name, slot in state.slot_of.items()},
        waiting=tuple(state.waiting.slots.tolist()),
        running=tuple(state.running.tolist()),
        aside={slot: aside.reason for slot, aside in state.aside.items()},
        blocks=state.blocks.inspect(),
        stages={name: value for name, value in shown.items() if value is not None},
        steps_in_flight=tuple(steps_in_flight),
    )


def _sequence(state: EngineState, sequence: Sequence) -> SequenceSnapshot:
    table, slot = state.table, sequence.slot
    claim = sequence.claim
    held = () if claim is None or claim.blocks is None else tuple(claim.blocks.tolist())
    return SequenceSnapshot(
        request=sequence.request,
        slot=slot,
        state=state.aside[slot].reason if slot in state.aside else sequence.state.name.lower(),
        row=int(table.row[slot]),
        num_prompt_tokens=int(table.num_prompt_tokens[slot]),
        num_tokens=int(table.num_tokens[slot]),
        num_known_tokens=int(table.num_known_tokens[slot]),
        num_computed_tokens=int(table.num_computed_tokens[slot]),
        num_preemptions=int(table.num_preemptions[slot]),
        block_table=tuple(state.blocks_of(sequence).tolist()),
        claimed_blocks=held,
        num_claimed_tokens=0 if claim is None else claim.num_tokens,
        is_provisional=sequence.is_provisional,
    )
