"""Sees that a policy does not starve everybody: twice in a row nothing scheduled although something could run is a fault."""

from __future__ import annotations

from trencadis.engine.scheduling.admission import Admission
from trencadis.engine.state import EngineState
from trencadis.errors import ContractError

__all__ = ["ProgressWatch"]

_MAX_IDLE = 2


class ProgressWatch:
    """Counts idle steps of one engine.

    Args:
        state: The engine's state, read only.
        admission: Knows of lookups that are awaited.

    Attributes:
        num_idle: Steps in a row that scheduled nothing although something could run; 0 with each that schedules any token.
    """

    def __init__(self, state: EngineState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self.num_idle = 0

    def seen(self, *, num_tokens: int, excused: bool) -> ContractError | None:
        """Note what runs; returns the policy's fault once nothing has for too long.

        Args:
            num_tokens: Of the steps in flight; one that only carries the KV connector's message has none.
            excused: Something else happened, or nothing was meant to run.
        """
        state = self._state
        if num_tokens:
            self.num_idle = 0
            return None
        could_run = state.running.size or self._could_admit()
        self.num_idle = self.num_idle + 1 if could_run and not excused else 0
        if self.num_idle < _MAX_IDLE:
            return None
        self.num_idle = 0
        return ContractError(
            f"it scheduled nothing twice in a row with {len(state.running)} sequences running "
            f"and {len(state.waiting)} waiting"
        )

    def _could_admit(self) -> bool:
        """Whether whoever comes first could run: nothing is in use, or what is is held for others and leaves room for all that wait."""
        state = self._state
        if not len(state.waiting) or self._admission.num_pending or state.transfers.num_parked:
            return False
        num_held = state.transfers.num_held_blocks
        if state.blocks.num_used > num_held:
            return False
        return not num_held or all(self._admission.lacks(slot) == (0, 0) for slot in state.waiting.slots.tolist())
