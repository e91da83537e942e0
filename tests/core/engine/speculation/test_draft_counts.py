from __future__ import annotations

import numpy as np
import pytest

from trencadis.engine.inspect.accounting import DraftCounts, added, count_drafts
from trencadis.records import Drafts


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_step_without_drafts_counts_nothing() -> None:
    assert count_drafts(None, ints()) == DraftCounts()
    assert (DraftCounts().num_drafted, DraftCounts().num_accepted) == (0, 0)


def test_chains_are_counted_by_the_drafts_before_each() -> None:
    found = count_drafts(Drafts(num_drafts=ints(3, 0, 1), token_ids=ints(5, 6, 7, 8)), ints(2, 0, 0))
    assert found == DraftCounts(num_sequences=2, num_drafted_by_position=(2, 1, 1), num_accepted_by_position=(1, 1, 0))
    assert (found.num_drafted, found.num_accepted) == (4, 2)


def test_trees_are_counted_by_depth() -> None:
    """Two children of the newest token, of which the second has two of its own and one of these another; and a chain."""
    drafts = Drafts(num_drafts=ints(5, 2), token_ids=ints(1, 2, 3, 4, 5, 6, 7), parents=ints(-1, -1, 1, 1, 3, -1, 0))
    found = count_drafts(drafts, ints(3, 1))
    assert found == DraftCounts(num_sequences=2, num_drafted_by_position=(3, 3, 1), num_accepted_by_position=(2, 1, 1))


@pytest.mark.parametrize("seed", range(5))
def test_depths_are_those_of_a_walk_from_each_draft(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, 6).astype(np.int32)
    parents = [int(rng.integers(-1, i)) for count in counts for i in range(count)]
    depths, first = [], 0
    for count in counts.tolist():
        mine: list[int] = []
        for i in range(count):
            parent = parents[first + i]
            mine.append(0 if parent < 0 else mine[parent] + 1)
        depths += mine
        first += count
    drafts = Drafts(num_drafts=counts, token_ids=ints(*range(len(parents))), parents=ints(*parents))
    assert count_drafts(drafts, np.zeros(6, np.int32)).num_drafted_by_position == tuple(np.bincount(depths).tolist())


def test_sums_are_as_long_as_the_longer_one() -> None:
    assert added((1, 2), (3,)) == (4, 2)
    assert added((), (3, 4)) == (3, 4)
