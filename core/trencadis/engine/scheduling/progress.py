"""Notices a scheduling policy with which an engine makes no progress."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.state import EngineState
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ContractError, StepFailedError

__all__ = ["Progress"]

_MAX_IDLE_STEPS = 2
"""A policy that schedules nothing so often in a row, although something could run, is at fault."""


class Progress:
    """Watches the steps of one engine.

    Args:
        state: The engine's state, read only.
        scheduler: Holds the policy that is quarantined.
        in_flight: Steps that were submitted and are not committed.
        give_up: Called if the policy has no fallback.

    Attributes:
        num_idle_steps: Steps in a row in which nothing was scheduled although something could run; a step with tokens sets it to 0.
    """

    def __init__(
        self,
        state: EngineState,
        scheduler: Scheduler,
        in_flight: Collection[SubmittedStep],
        give_up: Callable[[StepFailedError], None],
    ) -> None:
        self.num_idle_steps = 0
        self._state = state
        self._policy = scheduler.policy
        self._admission = scheduler.admission
        self._in_flight = in_flight
        self._give_up = give_up

    def watch(self, *, is_excused: bool) -> None:
        """Quarantine a policy that twice in a row schedules nothing although something could run.

        Args:
            is_excused: The engine is paused, or sequences ended.
        """
        state = self._state
        if any(step.plan.num_tokens for step in self._in_flight):  # one with orders of a stage alone has none
            self.num_idle_steps = 0
            return
        could_run = state.running.size or self._could_admit()
        self.num_idle_steps = self.num_idle_steps + 1 if could_run and not is_excused else 0
        if self.num_idle_steps < _MAX_IDLE_STEPS:
            return
        self.num_idle_steps = 0
        fault = f"it scheduled nothing twice in a row with {len(state.running)} sequences running and {len(state.waiting)} waiting"
        try:
            self._policy.quarantine(ContractError(fault))
        except StepFailedError as error:
            self._give_up(error)

    def _could_admit(self) -> bool:
        """Whether the first waiting sequence could run: no block is in use, or those that stages hold leave room for all that wait."""
        state, admission = self._state, self._admission
        if not len(state.waiting) or admission.num_pending or any(not one.is_queued for one in state.aside.values()):
            return False
        num_pinned = state.num_kept_blocks
        if state.blocks.num_used > num_pinned:
            return False
        return not num_pinned or all(admission.lacks(slot) == (0, 0) for slot in state.waiting.slots.tolist())
