from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine.sequences import SlotQueue


@given(st.lists(st.tuples(st.sampled_from(["append", "push_front", "remove"]), st.integers(0, 12)), max_size=300))
def test_queue_behaves_like_a_deque(operations: list[tuple[str, int]]) -> None:
    queue, model = SlotQueue(4), deque()
    for operation, slot in operations:
        if operation == "remove":
            assert queue.remove(slot) == (slot in model)
            if slot in model:
                model.remove(slot)
        else:
            getattr(queue, operation)(slot)
            (model.append if operation == "append" else model.appendleft)(slot)
        assert queue.slots.tolist() == list(model)
        assert len(queue) == len(model)


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "append", "push_front", "remove"]), st.integers(0, 300)), max_size=300
    )
)
def test_those_behind_the_front_are_in_the_order_in_which_they_were_appended(operations: list[tuple[str, int]]) -> None:
    queue, front, tail = SlotQueue(4), [], []
    for number, (operation, choice) in enumerate(operations):
        if operation == "remove":
            gone = (front + tail)[choice % len(front + tail)] if front + tail else 0
            queue.remove(gone)
            front, tail = ([slot for slot in part if slot != gone] for part in (front, tail))
        else:
            getattr(queue, operation)(number)
            front, tail = ([number, *front], tail) if operation == "push_front" else (front, [*tail, number])
        assert (queue.slots[: queue.num_front].tolist(), queue.slots[queue.num_front :].tolist()) == (front, tail)


def test_view_cannot_be_written() -> None:
    queue = SlotQueue()
    queue.append(1)
    assert not queue.slots.flags.writeable
