from __future__ import annotations

import numpy as np

from trencadis.records import DraftDistributions, Drafts


def ints(*values):
    return np.array(values, np.int32)


CHAINS = Drafts(num_drafts=ints(2, 0, 3), token_ids=ints(10, 11, 30, 31, 32))


def test_drafts_are_taken_in_another_order():
    taken = CHAINS.take(ints(2, 0), ints(3, 2))
    assert taken.num_drafts.tolist() == [3, 2]
    assert taken.token_ids.tolist() == [30, 31, 32, 10, 11]
    assert taken.parents is None
    assert taken.distributions is None


def test_the_first_of_each_are_taken():
    taken = CHAINS.take(ints(2, 1, 0), ints(1, 0, 1))
    assert taken.num_drafts.tolist() == [1, 0, 1]
    assert taken.token_ids.tolist() == [30, 10]


def test_parents_and_rows_of_distributions_come_along():
    table = object()
    tree = Drafts(
        num_drafts=ints(3, 2),
        token_ids=ints(1, 2, 3, 4, 5),
        parents=ints(-1, -1, 0, -1, 0),
        distributions=DraftDistributions(rows=ints(0, 0, 1, -1, 2), probabilities=table),
    )
    taken = tree.take(ints(1, 0), ints(2, 2))
    assert taken.parents.tolist() == [-1, 0, -1, -1]
    assert taken.distributions.rows.tolist() == [-1, 2, 0, 0]
    assert taken.distributions.probabilities is table
