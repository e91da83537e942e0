from __future__ import annotations

import pytest

from trencadis_plugins.draft_length.config import TableConfig
from trencadis_plugins.draft_length.table import Table
from trencadis_testing.draft_length import DraftLengthConformance, length_view


class TestTable(DraftLengthConformance):
    make = Table


@pytest.mark.parametrize(
    ("num_running", "drafts"), [(1, 6), (8, 6), (9, 3), (32, 3), (33, 1), (128, 1), (129, 0), (5000, 0)]
)
def test_default_drafts_less_the_more_sequences_decode(num_running, drafts):
    assert Table().choose(length_view([6], num_running=num_running)).tolist() == [drafts]


@pytest.mark.parametrize(("num_running", "drafts"), [(1, 3), (64, 3), (65, 1), (128, 1), (129, 0), (512, 0), (513, 0)])
def test_ranges_are_looked_up_with_their_ends_and_nothing_is_drafted_beyond(num_running, drafts):
    table = Table(TableConfig(sizes=("1-64:3", "65-128:1", "129-512:0")))
    assert table.choose(length_view([6, 9], num_running=num_running)).tolist() == [drafts, drafts]


def test_sequences_that_may_not_be_drafted_for_count():
    assert Table(TableConfig(sizes=("1-2:4", "3-:1"))).choose(length_view([6], num_running=3)).tolist() == [1]


def test_the_limit_of_a_sequence_holds():
    assert Table(TableConfig(sizes=("1-:3",))).choose(length_view([1, 3, 5])).tolist() == [1, 3, 3]
