"""Between the engine and a speculator: who is drafted for, how much, and what became of it."""

from __future__ import annotations

import numpy as np

from trencadis.engine.state import EngineState
from trencadis.errors import StepFailedError
from trencadis.interfaces import DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Plan, StepOutput

__all__ = ["Drafting"]

_EMPTY = np.empty(0, np.int32)


class Drafting:
    """Asks a speculator for drafts; a null object without one.

    Args:
        state: The engine's state, read only.
        speculator: Who drafts, or None.
        max_draft_tokens: The most drafts of a sequence in a step.
    """

    def __init__(self, state: EngineState, speculator: Speculator | None = None, *, max_draft_tokens: int = 0) -> None:
        self._state = state
        self._speculator = speculator
        self._max_draft_tokens = max_draft_tokens

    def propose(self) -> tuple[Drafts | None, Int32Array]:
        """Return drafts for running decodes, and their slots.

        Raises:
            StepFailedError: The speculator raised or drafted more than it may.
        """
        if self._speculator is None:
            return None, _EMPTY
        state, table = self._state, self._state.table
        slots = state.running
        slots = slots[table.num_tokens[slots] - table.num_computed_tokens[slots] == 1]
        if not slots.size:
            return None, _EMPTY
        room = table.max_total_tokens[slots] - table.num_tokens[slots] - 1
        most = np.clip(room, 0, self._max_draft_tokens).astype(np.int32)
        view = DraftView(
            slots=slots,
            epochs=table.epoch[slots],
            token_ids=tuple(state.known_tokens(table.sequence(slot)) for slot in slots.tolist()),
            max_draft_tokens=most,
        )
        try:
            drafts = self._speculator.propose(view)
        except Exception as error:
            raise StepFailedError(
                f"{type(self._speculator).__name__} raised {type(error).__name__}: {error}."
            ) from error
        if (drafts.num_drafts > most).any() or len(drafts.token_ids) != int(drafts.num_drafts.sum()):
            raise StepFailedError(
                f"{type(self._speculator).__name__} drafted {drafts.num_drafts.tolist()}, allowed are {most.tolist()}."
            )
        return drafts, slots

    def verified(self, plan: Plan, output: StepOutput) -> None:
        """Tell the speculator what was accepted."""
        if self._speculator is not None and plan.drafts is not None:
            self._speculator.on_verified(
                slots=plan.slots,
                num_drafts=plan.drafts.num_drafts,
                num_accepted=np.maximum(output.num_emitted - 1, 0).astype(np.int32),
            )

    def finished(self, slot: int) -> None:
        """Tell the speculator that a sequence left."""
        if self._speculator is not None:
            self._speculator.on_finished(slot=slot)
