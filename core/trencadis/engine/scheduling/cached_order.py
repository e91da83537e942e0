"""The policy's order of a queue that is too long to be sorted in every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trencadis.engine.guards import GuardedScheduling
from trencadis.engine.scheduling.queues import SlotQueue
from trencadis.interfaces import SchedulerView
from trencadis.records import BoolArray, Int32Array

__all__ = ["KeptOrder"]


class KeptOrder:
    """Asks the policy for its order in every step, or, of ``n`` waiting sequences, in every ``n // per_step``-th.

    Between, the order stands: those that left are left out, those that came since are behind, those put back to the front of
    the queue are before. So what sorting costs a step does not grow with the queue; what it costs is that a newcomer to a
    queue of 100,000 finds its place some 24 steps late.

    Args:
        queue: Who waits.
        policy: The guarded scheduling policy.
        is_waiting: Tells of a slot whether it waits.
        per_step: Sequences to sort for in a step, on average.
    """

    def __init__(
        self, queue: SlotQueue, policy: GuardedScheduling, *, is_waiting: Callable[[int], bool], per_step: int = 4096
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._is_waiting = is_waiting
        self._per_step = per_step
        self._order: Int32Array = np.empty(0, np.int32)
        self._known: BoolArray = np.zeros(0, np.bool_)  # by slot: who is in the order
        self._sorted_by: object = None
        self._num_appended = self._num_removed = 0
        self._steps_left = 0

    def order(self, view: SchedulerView) -> Int32Array:
        """Return a permutation of ``view.waiting``; not to be changed."""
        num_steps = len(view.waiting) // self._per_step
        if self._steps_left and num_steps > 1 and self._sorted_by is self._policy.strategy:
            self._steps_left -= 1
            self._follow(view)
            return self._order
        order = self._policy.order(view)
        # One who takes the queue as it is may be asked in every step.
        self._steps_left = 0 if order is view.waiting else max(num_steps - 1, 0)
        if self._steps_left:
            self._keep(order, view)
        return order

    def _keep(self, order: Int32Array, view: SchedulerView) -> None:
        self._order = order.copy()
        self._sorted_by = self._policy.strategy  # after the call, which may have put a fallback in its place
        self._known = np.zeros(len(view.arrival_s), np.bool_)
        self._known[order] = True
        self._num_appended, self._num_removed = self._queue.num_appended, self._queue.num_removed

    def _follow(self, view: SchedulerView) -> None:
        """Bring the order up to date with the queue: O(changes) if those that left were the first, as is usual."""
        queue, waiting = self._queue, view.waiting
        num_gone, num_new = queue.num_removed - self._num_removed, queue.num_appended - self._num_appended
        self._num_appended, self._num_removed = queue.num_appended, queue.num_removed
        if len(self._known) < len(view.arrival_s):
            self._known = np.append(self._known, np.zeros(len(view.arrival_s) - len(self._known), np.bool_))
        num_first = 0
        while num_first < min(num_gone, len(self._order)) and not self._is_waiting(int(self._order[num_first])):
            num_first += 1
        self._known[self._order[:num_first]] = False
        self._order = self._order[num_first:]
        if num_first < num_gone:
            self._leave_out(waiting)
        front, tail = waiting[: queue.num_front], waiting[max(queue.num_front, len(waiting) - num_new) :]
        front, tail = front[~self._known[front]], tail[~self._known[tail]]
        if front.size or tail.size:
            self._known[front] = self._known[tail] = True
            self._order = np.concatenate([front, self._order, tail])

    def _leave_out(self, waiting: Int32Array) -> None:
        """Leave out those that do not wait, wherever they are."""
        waits = np.zeros(len(self._known), np.bool_)
        waits[waiting] = True
        stays = waits[self._order]
        self._known[self._order[~stays]] = False
        self._order = self._order[stays]
