from __future__ import annotations

import numpy as np

from trencadis_plugins.scheduling.columns import SlotColumn


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_slot_that_was_never_set_is_zero_however_large():
    column = SlotColumn(2)
    assert column[0] == column[10**9] == 0.0
    assert column.of(slots(1, 50)).tolist() == [0.0, 0.0]


def test_it_grows_and_keeps_what_it_holds():
    column = SlotColumn(2)
    column[1] = 3.5
    column[100] = 7.0
    column.set_all(slots(4000, 5), np.array([1.0, 2.0]))
    assert column.of(slots(1, 100, 4000, 5, 6)).tolist() == [3.5, 7.0, 1.0, 2.0, 0.0]


def test_no_slots_are_no_numbers():
    column = SlotColumn(2)
    column.set_all(slots(), 1.0)
    assert column.of(slots()).tolist() == []


def test_what_it_returns_is_a_copy():
    column = SlotColumn(2)
    column.of(slots(0))[0] = 9.0
    assert column[0] == 0.0
