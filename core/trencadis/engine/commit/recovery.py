"""After a step that failed: find the sequence at fault, and keep all others.

No token of a failed step counts, and steps in flight after it used its tokens; so all of them are dropped and their
sequences are recomputed. Each sequence of the failed step then runs alone once: the one that
fails alone ends with the error, the others go on.

Where the ranks were lost, so is every KV block. Chance ends a process as well as a request does: so the sequences of a lost step are
suspects only when it is the second one that they are in, and one ends only when it has been in three, the last one alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.engine.sequences import SequenceState
from trencadis.engine.state import EngineState
from trencadis.errors import BackendError, RanksLostError, UnpreparedShapeError
from trencadis.faults import FaultLog
from trencadis.interfaces import Executor, SupportsRestart
from trencadis.interfaces.restorable import Restorable
from trencadis.records import FinishedSequence, FinishReason, Plan

__all__ = ["MOST_LOSSES", "SUSPECT_LOSSES", "Recovery", "restart_ranks"]

RERUN_COST_S = 0.1
"""What one sequence that runs alone once costs the others, about; counts against whoever is at fault."""

SUSPECT_LOSSES, MOST_LOSSES = 2, 3
"""Lost steps after which a sequence runs alone, and after which one that was lost alone ends."""

logger = logging.getLogger("trencadis.engine")


class Recovery(Restorable):
    """Takes failed steps apart.

    Args:
        state: The engine's state; changed.

    Attributes:
        suspects: Slots that run alone, one after the other, until the one at fault is found.
    """

    restored = ("suspects", "_num_others", "_num_losses")

    def __init__(self, state: EngineState) -> None:
        self.suspects: list[int] = []
        self._state = state
        self._faults = FaultLog(logger)
        self._num_others: dict[int, int] = {}  # by suspect: sequences that were computed anew with it
        self._num_losses: dict[int, int] = {}  # lost steps that a sequence was in

    def step_failed(self, plan: Plan, dropped: list[Plan], error: Exception) -> list[FinishedSequence]:
        """Undo a failed step and all steps in flight after it; returns sequences that are at fault.

        Args:
            plan: The plan that failed.
            dropped: Plans submitted after it, whose outputs are ignored.
            error: The exception that it raised.
        """
        suspects = self._live(plan)
        alone = (
            plan.num_sequences == 1 and not plan.preempted.size
        )  # else it may be the copies of whom it took the place of
        refused = isinstance(error, UnpreparedShapeError)
        self._faults.say(
            f"step {type(error.__cause__).__name__}",
            f"Step {plan.step} failed: {error}",
            error=None if refused else error,
            level=logging.ERROR,
        )
        at_fault: list[FinishedSequence] = []
        if alone and suspects:
            slot = suspects[0]
            sequence = self._state.table.sequence(slot)
            cost_s = self._num_others.get(slot, 0) * RERUN_COST_S
            self._forget_in_flight(slot)
            at_fault.append(self._state.finish(sequence, FinishReason.ERROR, error=str(error), cost_s=cost_s))
            self.forget(slot)
            suspects = []
        touched = {slot: None for p in dropped for slot in self._live(p)} | dict.fromkeys(suspects)
        for slot in reversed(touched):
            self._undo(slot)
        for slot in suspects:
            self._num_others[slot] = self._num_others.get(slot, 0) + len(suspects) - 1
        self.suspects.extend(slot for slot in suspects if slot not in self.suspects)
        return at_fault

    def ranks_lost(self, plans: Sequence[Plan], error: Exception) -> list[FinishedSequence]:
        """Let every sequence be computed anew, with the tokens that it has; returns one that is at fault.

        Args:
            plans: The steps in flight that were lost: one of several stages may have been at any of them; empty: it was no step.
            error: The exception that the oldest one's ``wait`` raised.
        """
        state, at_fault = self._state, list[FinishedSequence]()
        lost = dict.fromkeys(slot for plan in plans for slot in self._live(plan))
        for slot in lost:
            losses = self._num_losses[slot] = self._num_losses.get(slot, 0) + 1
            if losses >= MOST_LOSSES and len(lost) == 1:
                self._forget_in_flight(slot)
                at_fault.append(state.finish(state.table.sequence(slot), FinishReason.ERROR, error=str(error)))
                self.forget(slot)
            elif losses >= SUSPECT_LOSSES and slot not in self.suspects:
                self.suspects.append(slot)
        for slot in reversed(state.running.tolist()):
            self._undo(slot)
        for slot in state.waiting.slots.tolist():
            self._forget_in_flight(slot)  # one that was preempted may wait for its last token
        state.blocks.reset_cache()
        state.row_starts.clear()
        return at_fault

    def step_done(self, plan: Plan) -> None:
        """Clear the suspect that ran alone, once it has yielded a token."""
        if self.suspects and plan.num_sequences == 1 and plan.samples[0]:
            self.forget(int(plan.slots[0]))

    def _live(self, plan: Plan) -> list[int]:
        table = self._state.table
        return [
            slot
            for slot, epoch in zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True)
            if table.sequences[slot] is not None
            and (table.epoch[slot] == epoch or table.sequence(slot).late_token_epoch == epoch)
        ]

    def _undo(self, slot: int) -> None:
        self._forget_in_flight(slot)
        sequence = self._state.table.sequence(slot)
        if sequence.state is SequenceState.RUNNING:
            self._state.preempt(sequence, kv_valid=False)

    def _forget_in_flight(self, slot: int) -> None:
        table = self._state.table
        table.num_tokens[slot] = table.num_known_tokens[slot]

    def forget(self, slot: int) -> None:
        """Suspect a sequence no longer: it left the engine, or was cleared."""
        self._num_others.pop(slot, None)
        self._num_losses.pop(slot, None)
        if slot in self.suspects:
            self.suspects.remove(slot)


def restart_ranks(executor: Executor, error: RanksLostError) -> None:
    """Start an executor's ranks again; takes as long as its first start.

    Raises:
        BackendError: They cannot be started, or were lost too often.
    """
    ACTIVITY.begin(EnginePhase.RESTARTING)
    if not isinstance(executor, SupportsRestart):
        raise BackendError(f"{type(executor).__name__} lost its ranks and has no restart(): {error}") from error
    executor.restart()
