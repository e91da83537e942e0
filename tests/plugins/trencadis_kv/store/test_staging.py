from __future__ import annotations

import tracemalloc
import weakref

import pytest

from trencadis_kv.store import staging as staging_module
from trencadis_kv.store.staging import Staging, runs


def staging_of(num_slots):
    staging = Staging(num_slots * 8 + 7)
    staging.open(8)
    return staging


def test_slots_are_taken_once_until_they_are_given_back():
    staging = staging_of(5)
    assert staging.num_slots == 5
    first, second = staging.take(3), staging.take(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert staging.take(1) == []
    staging.give_back(second)
    assert staging.take(3) == []
    assert sorted(staging.take(2)) == sorted(second)


def test_share_and_bytes_are_those_of_taken_slots():
    staging = staging_of(4)
    assert (staging.fraction, staging.num_bytes) == (0.0, 0)
    slots = staging.take(3)
    assert (staging.fraction, staging.num_bytes) == (0.75, 24)
    staging.give_back(slots)
    assert staging.num_bytes == 0


def test_memory_that_was_used_last_is_used_first_and_in_one_run():
    staging = staging_of(100)
    slots = staging.take(7)
    assert list(runs(slots)) == [(0, slots[0], slots[0] + 7)]
    staging.give_back(slots)
    assert staging.take(7) == slots


def test_slots_hold_what_is_written_to_them():
    staging = staging_of(4)
    slots = staging.take(4)
    for slot in slots:
        staging.rows(slot, slot + 1)[:] = slot
    assert staging.rows(1, 3).tolist() == [[1] * 8, [2] * 8]


def test_memory_smaller_than_a_block_has_no_slots():
    staging = Staging(7)
    staging.open(8)
    assert staging.take(1) == []
    assert staging.fraction == 1.0


def test_a_slot_that_nobody_took_costs_nothing():
    """The default memory has millions of slots, if blocks are small."""
    tracemalloc.start()
    try:
        staging = staging_of(1 << 20)
        assert staging.num_slots == 1 << 20
        assert staging.take(3) == [0, 1, 2]
        python_bytes = sum(
            trace.size
            for trace in tracemalloc.take_snapshot()
            .filter_traces([tracemalloc.Filter(True, staging_module.__file__)])
            .traces
            if trace.domain == 0
        )
    finally:
        tracemalloc.stop()
    assert python_bytes < 10_000


def test_slots_of_both_kinds_are_taken_together():
    staging = staging_of(8)
    slots = staging.take(3)
    staging.give_back(slots)
    assert staging.take(5) == [0, 1, 2, 3, 4]
    assert staging.fraction == 5 / 8
    assert staging.take(4) == []
    assert staging.take(3) == [5, 6, 7]


def test_closed_memory_goes_back_to_the_system_and_still_tells_who_keeps_slots():
    staging = staging_of(4)
    slots = staging.take(3)
    memory = weakref.ref(staging._memory)
    view = staging.rows(0, 1)
    staging.give_back(slots[:1])
    staging.close()
    staging.close()
    assert memory() is not None, "somebody looks at it"
    del view
    assert memory() is None
    assert staging.take(1) == []
    assert staging.num_bytes == 16
    staging.give_back(slots[1:])
    assert staging.num_bytes == 0
    assert staging.take(1) == []


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([3], [(0, 3, 4)]),
        ([3, 4, 5, 9, 8, 1, 2], [(0, 3, 6), (3, 9, 10), (4, 8, 9), (5, 1, 3)]),
    ],
)
def test_runs_are_of_consecutive_slots(slots, expected):
    assert list(runs(slots)) == expected
