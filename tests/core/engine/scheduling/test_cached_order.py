from __future__ import annotations

import types
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine.scheduling.admission import CachedOrder
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.sequences import SlotQueue
from trencadis.interfaces import SchedulingPolicy

OPERATIONS = st.tuples(st.sampled_from(["append", "append", "push_front", "remove", "step"]), st.integers(0, 40))


class Backwards(SchedulingPolicy):
    """The largest slot first; counts how often it is asked."""

    num_asked = 0

    def order(self, view: Any) -> Any:
        self.num_asked += 1
        return np.sort(view.waiting)[::-1]


def view_of(queue: SlotQueue) -> Any:
    return types.SimpleNamespace(waiting=queue.slots, arrival_s=np.zeros(64))


def house(num_waiting: int, per_step: int) -> tuple[SlotQueue, Backwards, CachedOrder]:
    queue, policy = SlotQueue(4), Backwards()
    for slot in range(num_waiting):
        queue.append(slot)
    return (
        queue,
        policy,
        CachedOrder(
            queue,
            GuardedScheduling("a policy", policy),
            is_waiting=lambda slot: slot in queue.slots,
            per_step=per_step,
        ),
    )


@given(st.lists(OPERATIONS, max_size=200))
def test_whatever_happens_between_it_is_a_permutation_in_which_those_that_stay_keep_their_order(
    operations: list[tuple[str, int]],
) -> None:
    queue, policy, kept = house(12, per_step=4)
    before: list[int] = []
    for operation, slot in operations:
        present = queue.slots.tolist()
        if operation == "remove":
            queue.remove(slot)
        elif operation != "step" and slot not in present:
            getattr(queue, operation)(slot)
        elif operation == "step":
            num_asked = policy.num_asked
            order = kept.order(view_of(queue)).tolist()
            assert sorted(order) == sorted(queue.slots.tolist())
            if policy.num_asked > num_asked:
                assert order == sorted(order, reverse=True)
            else:
                stayed = [slot for slot in before if slot in order]
                assert [slot for slot in order if slot in stayed] == stayed
            before = order


def test_a_long_queue_is_sorted_once_in_so_many_steps_as_its_length_says() -> None:
    queue, policy, kept = house(12, per_step=4)
    for _ in range(9):
        kept.order(view_of(queue))
    assert policy.num_asked == 3


def test_newcomers_are_behind_and_those_put_back_before_until_it_is_sorted_again() -> None:
    queue, _, kept = house(12, per_step=4)
    kept.order(view_of(queue))
    queue.remove(3)
    queue.append(20)
    queue.push_front(30)
    assert kept.order(view_of(queue)).tolist() == [30, 11, 10, 9, 8, 7, 6, 5, 4, 2, 1, 0, 20]
    kept.order(view_of(queue))
    assert kept.order(view_of(queue)).tolist() == [30, 20, 11, 10, 9, 8, 7, 6, 5, 4, 2, 1, 0]


def test_another_policy_is_asked_at_once() -> None:
    queue, _, kept = house(12, per_step=4)
    kept.order(view_of(queue))
    kept._policy.strategy = SchedulingPolicy()
    assert kept.order(view_of(queue)).tolist() == list(range(12))


def test_a_policy_that_takes_the_queue_as_it_is_is_asked_in_every_step() -> None:
    queue, _, kept = house(12, per_step=4)
    kept._policy.strategy = SchedulingPolicy()
    kept.order(view_of(queue))
    queue.append(20)
    assert kept.order(view_of(queue)) is not None
    assert kept._steps_left == 0
