from __future__ import annotations

import numpy as np
import pytest

from trencadis.engine.sequences import Rows, SequenceTable
from trencadis.errors import InternalError


def test_slots_are_stable_while_the_table_grows() -> None:
    table = SequenceTable(2)
    slots = [table.take_slot() for _ in range(5)]
    assert slots == [0, 1, 2, 3, 4]
    table.num_tokens[slots] = [10, 11, 12, 13, 14]
    table.take_slot()
    for _ in range(10):
        table.take_slot()
    assert table.num_tokens[:5].tolist() == [10, 11, 12, 13, 14]


def test_reused_slot_starts_clean_with_a_new_epoch() -> None:
    table = SequenceTable(1)
    slot = table.take_slot()
    table.num_tokens[slot] = 7
    before = int(table.epoch[slot])
    table.give_back_slot(slot)
    assert table.take_slot() == slot
    assert (table.num_tokens[slot], table.row[slot]) == (0, -1)
    assert table.epoch[slot] > before


def test_free_slot_holds_no_sequence() -> None:
    with pytest.raises(InternalError, match="slot 0 holds no sequence"):
        SequenceTable().sequence(0)


def test_table_writes_are_logged_in_order_and_drained() -> None:
    rows = Rows(num_rows=2, max_model_len=16, block_size=4)
    for block in (5, 6):
        rows.write_blocks(np.array([1], np.int32), np.array([0], np.int32), np.array([block], np.int32))
    writes = rows.take_writes()
    assert writes.block_ids.tolist() == [5, 6]
    assert rows.block_tables[1, 0] == 6
    assert rows.take_writes().rows.size == 0


def test_rows_of_a_part_are_taken_and_come_back_there() -> None:
    rows = Rows(num_rows=6, max_model_len=8, block_size=4, num_parts=3)
    assert [rows.take(1), rows.take(1), rows.take(2)] == [2, 3, 4]
    assert [rows.num_free_in(one) for one in range(3)] == [2, 0, 1]
    rows.give_back(3)
    assert (rows.take(1), rows.num_free) == (3, 3)
