from __future__ import annotations

import numpy as np
import pytest

from trencadis.records import DraftDistributions, Drafts
from trencadis_plugins.speculation.mixed_drafts import merged, part_of
from trencadis_testing.speculation import draft_view


def i32(*values):
    return np.array(values, np.int32)


LINE = Drafts(num_drafts=i32(2, 0), token_ids=i32(10, 11))
TREE = Drafts(num_drafts=i32(3), token_ids=i32(20, 21, 22), parents=i32(-1, -1, 0))


def test_part_holds_the_same_facts_of_fewer_sequences():
    view = draft_view([[1], [2], [3]], most=[1, 9, 9], slots=[5, 6, 7], epochs=[1, 2, 3])
    part = part_of(view, [0, 2], 4)
    assert part.slots.tolist() == [5, 7]
    assert part.epochs.tolist() == [1, 3]
    assert part.max_draft_tokens.tolist() == [1, 4]
    assert part.max_draft_tokens.dtype == np.int32
    assert [tokens.tolist() for tokens in part.token_ids] == [[1], [3]]
    assert part.requests == (view.requests[0], view.requests[2])
    assert part.seeds == (0, 2)
    assert part.linear_only.tolist() == [False, False]


def test_drafts_come_in_the_order_of_the_sequences():
    drafts = merged([LINE, TREE], i32(2, -1, 0, 1), trees=True)
    assert drafts.num_drafts.tolist() == [3, 0, 2, 0]
    assert drafts.token_ids.tolist() == [20, 21, 22, 10, 11]
    assert drafts.parents.tolist() == [-1, -1, 0, -1, 0]
    assert drafts.distributions is None


def test_linear_drafts_have_no_parents_where_nobody_drafts_trees():
    drafts = merged([LINE], i32(0, 1), trees=False)
    assert drafts.parents is None
    assert drafts.token_ids.dtype == drafts.num_drafts.dtype == np.int32


@pytest.mark.parametrize("parts", [[], [Drafts(num_drafts=i32(0, 0), token_ids=i32())]])
def test_no_drafts_at_all_are_a_record_too(parts):
    drafts = merged(parts, i32(-1, -1), trees=True)
    assert drafts.num_drafts.tolist() == [0, 0]
    assert len(drafts.token_ids) == len(drafts.parents) == 0


def test_certain_drafts_have_no_distribution_beside_those_that_were_drawn():
    distributions = DraftDistributions(rows=i32(0, -1), probabilities=np.eye(1))
    drawn = Drafts(num_drafts=i32(2), token_ids=i32(30, 31), distributions=distributions)
    drafts = merged([LINE, drawn], i32(2, 0), trees=False)
    assert drafts.token_ids.tolist() == [30, 31, 10, 11]
    assert drafts.distributions.rows.tolist() == [0, -1, -1, -1]
    assert drafts.distributions.probabilities is distributions.probabilities


def test_distributions_of_several_speculators_lie_one_behind_the_other():
    torch = pytest.importorskip("torch")
    one, two = (
        Drafts(
            num_drafts=i32(1),
            token_ids=i32(token),
            distributions=DraftDistributions(rows=i32(row), probabilities=torch.eye(3)[: row + 1]),
        )
        for token, row in ((1, 1), (2, 0))
    )
    drafts = merged([one, two], i32(1, 0), trees=False)
    assert drafts.distributions.rows.tolist() == [2, 1]
    assert torch.equal(drafts.distributions.probabilities, torch.cat([torch.eye(3)[:2], torch.eye(3)[:1]]))
