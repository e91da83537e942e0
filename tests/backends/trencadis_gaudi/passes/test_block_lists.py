from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis_gaudi.passes.block_lists import (
    gathered_lists,
    owned_blocks,
    query_positions,
    ranged_lists,
    seen_slots,
    token_slots,
    window_entries,
)


def ints(*values):
    return np.array(values, np.int32)


PADDING = 1519
TABLES = np.array([[5, 2], [3, 0]], np.int32)
OWNED = owned_blocks(TABLES, ints(0, 1), ints(0, 0), ints(2, 1))
POSITIONS = query_positions(ints(128 + 265 % 128, 511 % 128), ints(1, 1), query_len=1)


@pytest.mark.parametrize(
    ("make", "blocks", "groups", "usage"),
    [
        (
            gathered_lists,
            [5, 2, 3, PADDING, PADDING, PADDING, PADDING, PADDING],
            [0, 0, 1, -1, -1, -1, -1, -1],
            [128, 10, 128, 1, 1, 1, 1, 1],
        ),
        (
            ranged_lists,
            [PADDING, PADDING, 2, 3, PADDING, 5, PADDING, PADDING],
            [-1, -1, 0, 1, -1, 0, -1, -1],
            [1, 1, 10, 128, 1, 128, 1, 1],
        ),
    ],
)
def test_lists_of_the_worked_example(make, blocks, groups, usage):
    """Tables [[5, 2], [3]], last slots 265 and 511, 128 tokens a block, eight entries."""
    lists = make(OWNED, num_entries=8, padding_block=PADDING)
    assert lists.blocks.tolist() == blocks
    assert lists.groups.tolist() == groups
    found, skipped = seen_slots(lists, POSITIONS, block_size=128)
    assert found[:, 0].tolist() == usage
    assert not skipped.any()


def test_range_gives_a_block_with_two_owners_to_the_later_one():
    owned = owned_blocks(np.array([[4], [4]], np.int32), ints(0, 1), ints(0, 0), ints(1, 1))
    assert ranged_lists(owned, num_entries=5, padding_block=9).groups.tolist() == [-1, -1, -1, -1, 1]


def test_owned_blocks_start_at_the_first_column_asked_for():
    owned = owned_blocks(np.arange(12, dtype=np.int32).reshape(3, 4), ints(2, 0), ints(1, 3), ints(3, 4))
    assert owned.blocks.tolist() == [9, 10, 3]
    assert owned.groups.tolist() == [0, 0, 1]
    assert owned.columns.tolist() == [1, 2, 3]


def test_later_drafts_see_more_of_the_last_block_and_a_window_hides_its_beginning():
    lists = gathered_lists(
        owned_blocks(np.array([[7, 3]], np.int32), ints(0), ints(0), ints(2)), num_entries=3, padding_block=9
    )
    positions = query_positions(ints(4), ints(2), query_len=3)
    assert positions.tolist() == [[4, 5, 5]]
    usage, skipped = seen_slots(lists, positions, block_size=4, window=3)
    assert usage.tolist() == [[4, 4, 4], [1, 2, 2], [1, 1, 1]]
    assert skipped.tolist() == [[2, 3, 3], [0, 0, 0], [0, 0, 0]]


def test_padding_goes_round_the_padding_block():
    slots = token_slots(
        np.array([[5, 2], [1, 3]], np.int32),
        ints(1, 0),
        ints(3, 0),
        ints(2, 1),
        batch_size=3,
        query_len=3,
        block_size=4,
        padding_block=6,
    )
    assert slots.tolist() == [[1 * 4 + 3, 3 * 4, 26], [20, 24, 25], [26, 27, 24]]


def test_pass_without_sequences_is_padding_alone():
    none = ints()
    owned = owned_blocks(TABLES, none, none, none)
    lists = gathered_lists(owned, num_entries=2, padding_block=8)
    usage, skipped = seen_slots(lists, query_positions(none, none, query_len=2), block_size=4, window=3)
    assert lists.blocks.tolist() == [8, 8]
    assert usage.tolist() == [[1, 1], [1, 1]]
    assert skipped.tolist() == [[0, 0], [0, 0]]
    slots = token_slots(TABLES, none, none, none, batch_size=1, query_len=2, block_size=4, padding_block=8)
    assert slots.tolist() == [[32, 33]]


@settings(max_examples=200, phases=(Stage.explicit, Stage.generate))
@given(size=st.integers(1, 6), window=st.integers(1, 20), query_len=st.integers(1, 5), start=st.integers(0, 40))
def test_window_list_holds_every_block_a_query_can_see(size, window, query_len, start):
    seen = {
        position // size
        for query in range(start, start + query_len)
        for position in range(max(0, query - window + 1), query + 1)
    }
    room = window_entries(10**6, batch_size=1, query_len=query_len, window=window, block_size=size)
    assert len(seen) <= room
    # It is tight: some start needs all of it.
    most = max((first + window + query_len - 2) // size - first // size + 1 for first in range(size))
    assert room == most
