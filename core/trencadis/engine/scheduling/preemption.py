"""Running sequences give way to a more urgent one that waits, if the policy preempts."""

from __future__ import annotations

import numpy as np

from trencadis.engine.guards import GuardedScheduling
from trencadis.engine.scheduling.admission import Admission
from trencadis.engine.state import EngineState
from trencadis.interfaces import SchedulerView
from trencadis.records import Int32Array

__all__ = ["GivingWay"]


class GivingWay:
    """Preempts for the first in the policy's order, all that it takes or nobody.

    Args:
        state: The engine's state; changed by :meth:`make_way`.
        policy: The guarded scheduling policy.
        admission: Knows what a waiting sequence lacks.
        max_preemptions: Sequences preempted as often never give way.
    """

    def __init__(
        self, state: EngineState, policy: GuardedScheduling, admission: Admission, *, max_preemptions: int
    ) -> None:
        self._state = state
        self._policy = policy
        self._admission = admission
        self._max_preemptions = max_preemptions

    def make_way(self, view: SchedulerView, order: Int32Array) -> list[int]:
        """Return the slots that were preempted for the first of ``order`` that could be admitted.

        Args:
            view: The state.
            order: Waiting slots, most urgent first.
        """
        table, adapters = self._state.table, self._state.adapters
        for slot in map(int, order):
            # Nothing is to be gained for one whose last token is in flight, or whose adapter must wait.
            if table.num_tokens[slot] == table.num_known_tokens[slot] and adapters.has_turn(slot):
                victims = self._chosen(view, slot)
                for victim in victims:
                    self._admission.notes.preempt(victim, for_slot=slot)
                    self._state.preempt(table.sequence(victim))
                return victims
        return []

    def _chosen(self, view: SchedulerView, slot: int) -> list[int]:
        """Return whom to preempt for one waiting sequence; nobody unless that is enough for it."""
        state, table = self._state, self._state.table
        rows, blocks = self._admission.lacks(slot)
        candidates = state.running[table.num_preemptions[state.running] < self._max_preemptions]
        chosen: list[int] = []
        while rows > 0 or blocks > 0:
            if not candidates.size:
                return []
            victim = self._policy.give_way(view, slot=slot, candidates=candidates)
            if victim < 0:
                return []
            chosen.append(victim)
            candidates = candidates[candidates != victim]
            rows -= 1
            held = state.blocks_of(table.sequence(victim))
            blocks -= int(np.count_nonzero(state.blocks.ref_counts[held] == 1))  # what it shares is not freed
        return chosen
