from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.engine.scheduling.admission import came_before
from trencadis.engine.sequences import SlotQueue


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_look_at_everybody_finds(seed) -> None:
    """Queues with any number of sequences that were put back to the front, whenever they came."""
    rng = random.Random(seed)
    queue, arrival_s = SlotQueue(), np.zeros(200)
    running: list[int] = []
    for slot in range(200):
        arrival_s[slot] = slot // 3  # some come at the same time
        queue.append(slot)
        if rng.random() < 0.4 and len(queue):
            chosen = int(rng.choice(queue.slots.tolist()))
            queue.remove(chosen)
            running.append(chosen)
        if rng.random() < 0.2 and running:
            queue.push_front(running.pop(rng.randrange(len(running))))
    for before_s in (0.0, 0.5, 10.0, 33.0, 66.0, 100.0):
        slots = queue.slots
        old = slots[arrival_s[slots] < before_s]
        assert (
            came_before(queue, arrival_s, before_s).tolist() == old[np.argsort(arrival_s[old], kind="stable")].tolist()
        )


def test_of_an_empty_queue_nobody_is() -> None:
    assert came_before(SlotQueue(), np.zeros(4), 1.0).tolist() == []


def test_a_long_queue_is_not_walked() -> None:
    class Counted(np.ndarray):
        num_reads = 0

        def __getitem__(self, key):
            Counted.num_reads += np.size(key)
            return super().__getitem__(key)

    queue, arrival_s = SlotQueue(), np.arange(100_000.0).view(Counted)
    for slot in range(100_000):
        queue.append(slot)
    assert came_before(queue, arrival_s, 7.0).tolist() == list(range(7))
    assert Counted.num_reads < 30
