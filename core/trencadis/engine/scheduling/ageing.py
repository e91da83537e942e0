"""Who has waited too long."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from trencadis.engine.scheduling.queues import SlotQueue
from trencadis.records import FloatArray, Int32Array

__all__ = ["came_before"]


def came_before(waiting: SlotQueue, arrival_s: FloatArray, before_s: float) -> Int32Array:
    """Return the waiting slots that arrived before a time, oldest first. Pure.

    O(log n) for each that was put back to the front of the queue, and a copy: the others are in order of arrival already.

    Args:
        waiting: The queue.
        arrival_s: By slot.
        before_s: Engine clock.
    """
    slots, num_front = waiting.slots, waiting.num_front
    front, tail = slots[:num_front], slots[num_front:]
    old = front[arrival_s[front] < before_s]
    num_old = bisect_left(tail, before_s, key=arrival_s.__getitem__)
    if not old.size:
        return tail[:num_old]
    old = old[np.argsort(arrival_s[old], kind="stable")]
    places = [bisect_left(tail, time_s, key=arrival_s.__getitem__) for time_s in arrival_s[old].tolist()]
    return np.insert(tail[:num_old], places, old)
