"""What becomes of steps in flight when one fails: drained, undone, and if need be every request is ended."""

from __future__ import annotations

import logging
from collections import deque

from trencadis.engine.commit.output_check import OutputCheck
from trencadis.engine.commit.recovery import Recovery
from trencadis.engine.inspect.accounting import EngineTotals, SubmittedStep
from trencadis.engine.inspect.decisions import Decisions
from trencadis.engine.state import EngineState
from trencadis.errors import StepFailedError
from trencadis.faults import FaultLog
from trencadis.records import FinishedSequence, FinishReason, Plan

__all__ = ["Failures"]


class Failures:
    """Takes failed steps of one engine out of flight.

    Args:
        state: The engine's state; changed.
        recovery: Finds the sequence at fault.
        decisions: The step record.
        totals: Counts failed steps.
        in_flight: Steps submitted and not committed, oldest first; drained.
        ended: Gets the sequences that end.
        outputs: Waits for steps.
    """

    def __init__(
        self,
        state: EngineState,
        recovery: Recovery,
        decisions: Decisions,
        *,
        totals: EngineTotals,
        in_flight: deque[SubmittedStep],
        ended: list[FinishedSequence],
        outputs: OutputCheck,
    ) -> None:
        self._state = state
        self._recovery = recovery
        self._decisions = decisions
        self._totals = totals
        self._in_flight = in_flight
        self._ended = ended
        self._outputs = outputs
        self._faults = FaultLog(logging.getLogger("trencadis.engine"))

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """Undo a step that failed, and those behind it."""
        self._totals.num_failed_steps += 1
        self._decisions.failed(plan.step, str(error))
        dropped = []
        while self._in_flight:
            dropped.append(self.drain_one())
        self._ended.extend(self._recovery.step_failed(plan, dropped, error))

    def refused(self, plan: Plan, error: Exception) -> None:
        """Take apart a plan that was not submitted: nobody else needs to fail for its shape, or for its swaps."""
        self._state.transfers.put_back(plan.connector_message)
        self.step_failed(plan, error)
        rows = set(plan.rows.tolist())
        self._state.row_starts = [start for start in self._state.row_starts if start.row not in rows]

    def everything_failed(self, error: StepFailedError) -> None:
        """End every live request: without a working strategy no step can be made."""
        self._totals.num_failed_steps += 1
        self._faults.say("everything", f"{error} Every live request ends.", error=error.__cause__, level=logging.ERROR)
        while self._in_flight:
            self.drain_one()
        state = self._state
        for slot in list(state.slot_of.values()):
            self._ended.append(state.finish(state.table.sequence(slot), FinishReason.ERROR, error=str(error)))
        state.row_starts.clear()

    def drain_one(self) -> Plan:
        """Wait for the oldest step in flight and forget its output; returns its plan."""
        step = self._in_flight.popleft()
        try:
            output = self._outputs.output_of(step)
        except Exception:  # the first failure is the one that is reported
            return step.plan
        self._state.transfers.apply(output.connector_reports, self._state, missed_layers=output.missed_layers)
        return step.plan
