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

    A sequence of priority p that waits overtakes fresh ones of priority q < p after ``(p - q) × age_s`` seconds at the latest. The key
    ``priority - wait / age_s`` differs from ``priority + arrival / age_s`` by the same for all, so two sequences never change
    places, and those that gave way do not push back. Keeps no state.

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
        return waiting[np.lexsort((view.arrival_s[waiting], self._keys(view, waiting)))]

    def give_way(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the least urgent candidate of those with a larger priority number that waiting has not made up for."""
        own = float(self._keys(view, np.array([slot], np.int32))[0])
        keys = np.where(view.priority[candidates] > view.priority[slot], self._keys(view, candidates), -np.inf)
        return largest(keys, candidates) if keys.max() > own else -1

    def _keys(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        return view.priority[slots] + view.arrival_s[slots] * self._priority_per_s
