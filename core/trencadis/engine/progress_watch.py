"""Sees that a policy does not starve everybody: twice in a row nothing scheduled although something could run is a fault."""

from __future__ import annotations

from trencadis.engine.admission import Admission
from trencadis.engine.state import EngineState
from trencadis.errors import ContractError

__all__ = ["ProgressWatch"]

_MAX_IDLE = 2


class ProgressWatch:
    """Counts idle steps of one engine.

    Args:
        state: The engine's state, read only.
        admission: Knows of lookups that are awaited.
    """

    def __init__(self, state: EngineState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._num_idle = 0

    def ran(self) -> None:
        """Note that something ran."""
        self._num_idle = 0

    def idled(self, *, excused: bool) -> ContractError | None:
        """Note that nothing ran; returns the policy's fault once it has gone on for too long.

        Args:
            excused: Something else happened, or nothing was meant to run.
        """
        state = self._state
        could_admit = len(state.waiting) and not state.blocks.num_used and not self._admission.num_pending
        could_run = state.running.size or could_admit
        self._num_idle = self._num_idle + 1 if could_run and not excused else 0
        if self._num_idle < _MAX_IDLE:
            return None
        self._num_idle = 0
        return ContractError(
            f"it scheduled nothing twice in a row with {len(state.running)} sequences running "
            f"and {len(state.waiting)} waiting"
        )
