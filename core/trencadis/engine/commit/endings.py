"""Ends requests, and tells stages, policy and observers once of each sequence that left the engine."""

from __future__ import annotations

import logging

import attrs

from trencadis.engine.commit.in_flight import StepsInFlight
from trencadis.engine.commit.recovery import Recovery
from trencadis.engine.inspect.accounting import Accounting
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.stage import Stages
from trencadis.engine.state import EngineState
from trencadis.errors import StepFailedError
from trencadis.faults import FaultLog
from trencadis.records import FinishedSequence, FinishReason, TokenDeltas

__all__ = ["Endings"]


class Endings:
    """Ends requests of one engine, and announces all that ended.

    Args:
        state: The engine's state; changed.
        policy: Scheduling policy, which is told.
        stages: Stages, which are told.
        recovery: Forgets its suspicion of a sequence that left.
        accounting: Counts, and tells the observers.
        in_flight: Submitted steps, dropped if a strategy fails for good.

    Attributes:
        ended: Sequences that ended outside a commit; the next step announces them.
    """

    def __init__(
        self,
        state: EngineState,
        policy: GuardedScheduling,
        stages: Stages,
        recovery: Recovery,
        accounting: Accounting,
        in_flight: StepsInFlight,
    ) -> None:
        self.ended: list[FinishedSequence] = []
        self._state = state
        self._policy = policy
        self._stages = stages
        self._recovery = recovery
        self._accounting = accounting
        self._in_flight = in_flight
        self._faults = FaultLog(logging.getLogger("trencadis.engine"))

    def end(self, request_id: str, reason: FinishReason) -> FinishedSequence | None:
        """End a request at once, whatever its state; None if there is no such request."""
        state = self._state
        slot = state.slot_of.get(request_id)
        if slot is None:
            return None
        state.clock.hold()
        finished = state.finish(state.table.sequence(slot), reason)
        self._announce(finished)
        return finished

    def announce_all(self, deltas: TokenDeltas) -> TokenDeltas:
        """Add sequences that ended outside a commit, and announce all that ended."""
        if self.ended:
            ended = tuple(self.ended)
            self.ended.clear()
            deltas = attrs.evolve(deltas, finished=(*deltas.finished, *ended))
        for finished in deltas.finished:
            self._announce(finished)
        return deltas

    def _announce(self, finished: FinishedSequence) -> None:
        """Tell stages, policy and observers that a sequence left."""
        tenant = int(self._state.table.tenant[finished.slot])
        for left in self._stages.left:
            left(finished)
        self._recovery.forget(finished.slot)
        try:
            self._policy.on_finished(slot=finished.slot, tenant=tenant, num_output_tokens=len(finished.token_ids))
        except StepFailedError as error:
            self.end_everything(error)
        self._accounting.finished(finished)

    def end_everything(self, error: StepFailedError) -> None:
        """End every live request: without a working strategy no step can be made."""
        self._accounting.totals.num_failed_steps += 1
        for failed in self._stages.failed:
            failed((), error)
        self._faults.say("everything", f"{error} Every live request ends.", error=error.__cause__, level=logging.ERROR)
        self._in_flight.drain()
        state = self._state
        for slot in list(state.slot_of.values()):
            self.ended.append(state.finish(state.table.sequence(slot), FinishReason.ERROR, error=str(error)))
        state.row_starts.clear()
