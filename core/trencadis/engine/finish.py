"""Who left the engine, and who is to hear of it."""

from __future__ import annotations

import attrs

from trencadis.engine.commit.recovery import Recovery
from trencadis.engine.failures import Failures
from trencadis.engine.guards import GuardedScheduling
from trencadis.engine.inspect.accounting import EngineTotals
from trencadis.engine.inspect.decisions import Decisions
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.speculation.drafting import Drafting
from trencadis.engine.state import EngineState
from trencadis.errors import StepFailedError
from trencadis.records import Embedding, FinishedSequence, FinishReason, TokenDeltas

__all__ = ["Departures"]


class Departures:
    """Announces sequences that ended to everybody who kept something for them.

    Args:
        state: The engine's state.
        policy: The guarded scheduling policy.
        decisions: The step record.
        recovery: Knows suspects of failed steps.
        drafting: Knows texts.
        observers: See every end.
        failures: Ends everything if the policy fails for good.
        totals: Counts.
        ended: Sequences that ended outside a commit; announced with the next step.
    """

    def __init__(
        self,
        state: EngineState,
        policy: GuardedScheduling,
        *,
        decisions: Decisions,
        recovery: Recovery,
        drafting: Drafting,
        observers: Observers,
        failures: Failures,
        totals: EngineTotals,
        ended: list[FinishedSequence],
    ) -> None:
        self._state = state
        self._first_tokens = state.transfers.first_tokens
        self._policy = policy
        self._decisions = decisions
        self._recovery = recovery
        self._drafting = drafting
        self._observers = observers
        self._failures = failures
        self._totals = totals
        self._ended = ended

    def end(self, request_id: str, reason: FinishReason) -> FinishedSequence | None:
        """End a request at once, whatever its state; None if there is no such request."""
        slot = self._state.slot_of.get(request_id)
        if slot is None:
            return None
        sequence = self._state.table.sequence(slot)
        tenant = int(self._state.table.tenant[slot])
        finished = self._state.finish(sequence, reason)
        self._announce(finished, tenant)
        return finished

    def with_ended(self, deltas: TokenDeltas, embedded: tuple[Embedding, ...] = ()) -> TokenDeltas:
        """Add embeddings and sequences that ended outside a commit, and announce all that ended."""
        if self._ended or self._first_tokens.ended or embedded:
            ended = (*self._ended, *self._first_tokens.take_ended())
            self._ended.clear()
            deltas = attrs.evolve(deltas, finished=(*deltas.finished, *ended), embeddings=embedded)
        for finished in deltas.finished:
            self._announce(finished, int(self._state.table.tenant[finished.slot]))
        return deltas

    def _announce(self, finished: FinishedSequence, tenant: int) -> None:
        self._totals.num_finished += 1
        self._decisions.left(finished)
        self._recovery.left(finished.slot)
        self._drafting.finished(finished.slot, finished.token_ids)
        try:
            self._policy.on_finished(slot=finished.slot, tenant=tenant, num_output_tokens=len(finished.token_ids))
        except StepFailedError as error:
            self._failures.everything_failed(error)
        if self._observers:
            self._observers.on_request(finished)
