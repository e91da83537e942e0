"""The most urgent first."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView, plain_state
from trencadis.records import FloatArray, Int32Array
from trencadis_plugins.scheduling.config import PriorityConfig
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.victims import largest

__all__ = ["Priority"]


@plain_state
class Priority(Fcfs):
    """Admits by priority number, smallest first, then by arrival; waiting makes up for priority.

    A sequence of priority p that has waited overtakes fresh ones of priority q < p after ``(p - q) × age_s`` seconds at the latest. Only
    time in the queue counts: one that runs gets no older, so that it gives way to urgent ones however long it has run. The key of those
    that wait, ``priority - waited / age_s``, falls at the same rate for all, so two of them never change places. Keeps no state.

    Args:
        config: Ageing, and whether running sequences give way.

    Source: ageing as in Silberschatz et al., Operating System Concepts, "Priority Scheduling".
    """

    def __init__(self, config: PriorityConfig | None = None) -> None:
        config = config if config is not None else PriorityConfig()
        super().__init__(config)
        self._priority_per_s = 1 / config.age_s if config.age_s else 0.0
        self.preempts = config.preempt

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by key, then by arrival."""
        waiting = view.waiting
        # Without the time of now, which is the same for all, roundings do not change places either.
        keys = self._keys(view, waiting, view.waited_s[waiting] - view.waiting_since_s[waiting])
        return waiting[np.lexsort((view.arrival_s[waiting], keys))]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the least urgent candidate of those with a larger priority number that waiting has not made up for."""
        own_s = view.waited_s[slot] + view.now_s - view.waiting_since_s[slot]
        own = view.priority[slot] - own_s * self._priority_per_s
        keys = self._keys(view, candidates, view.waited_s[candidates])
        keys = np.where(view.priority[candidates] > view.priority[slot], keys, -np.inf)
        return largest(keys, candidates) if keys.max() > own else -1

    def _keys(self, view: SchedulerView, slots: Int32Array, waited_s: FloatArray) -> FloatArray:
        return view.priority[slots] - waited_s * self._priority_per_s
