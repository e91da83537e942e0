"""Each fault of drafts is found, and named by its words."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.records import DraftDistributions, Drafts
from trencadis_testing.draft_checks import broken_distributions, broken_shapes, broken_trees
from trencadis_testing.speculation import draft_view


def i32(*values):
    return np.array(values, np.int32)


def drafts(counts, tokens, **more):
    return Drafts(num_drafts=np.array(counts, np.int32), token_ids=np.array(tokens, np.int32), **more)


VIEW = draft_view([[1], [2]], most=[2, 3])
GOOD = drafts([1, 2], [5, 6, 7])


def test_right_drafts_have_no_faults():
    distributions = DraftDistributions(rows=i32(0, -1, 1), probabilities=np.full((2, 10), 0.1))
    tree = drafts([1, 2], [5, 6, 7], parents=i32(-1, -1, -1), distributions=distributions)
    for one in (GOOD, tree):
        assert broken_shapes(one, VIEW, vocab_size=10) == []
        assert broken_trees(one, VIEW, drafts_trees=True) == []
        assert broken_distributions(one) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (drafts([1], [5]), "shape"),
        (drafts([3, 0], [5, 6, 7]), "allowed"),
        (drafts([-1, 0], []), "allowed"),
        (drafts([1, 1], [5]), "tokens for"),
        (drafts([1, 0], [10]), "below 10"),
        (drafts([1, 0], [-1]), "below 10"),
        (Drafts(num_drafts=i32(1, 0), token_ids=np.array([5])), "int64"),
    ],
)
def test_wrong_shapes_are_named(wrong, words):
    assert words in " ".join(broken_shapes(wrong, VIEW, vocab_size=10))


@pytest.mark.parametrize(
    ("parents", "tokens", "drafts_trees", "words"),
    [
        (i32(-1, 0, 0), [5, 6, 7], True, "before its parent"),
        (i32(-1, -2, 0), [5, 6, 7], True, "before its parent"),
        (i32(-1, -1, -1), [5, 6, 6], True, "the same"),
        (i32(-1, -1, -1), [5, 6, 7], False, "branch"),
        (i32(-1, -1), [5, 6, 7], True, "parents are"),
    ],
)
def test_wrong_trees_are_named(parents, tokens, drafts_trees, words):
    wrong = drafts([1, 2], tokens, parents=parents)
    assert words in " ".join(broken_trees(wrong, VIEW, drafts_trees=drafts_trees))


def test_trees_for_a_sequence_that_may_not_have_one_are_named():
    view = draft_view([[1], [2]], linear_only=True)
    line, tree = (drafts([1, 2], [5, 6, 7], parents=i32(-1, -1, last)) for last in (0, -1))
    assert broken_trees(line, view, drafts_trees=True) == []
    assert "sequence 1: drafts branch" in broken_trees(tree, view, drafts_trees=True)[0]


@pytest.mark.parametrize(
    ("rows", "distribution", "words"),
    [
        (i32(0, 0), [0.1] * 10, "rows of distributions"),
        (i32(0, 0, 1), [0.1] * 10, "of 1 distributions"),
        (i32(0, -2, 0), [0.1] * 10, "of 1 distributions"),
        (i32(0, 0, 0), [0.2] * 10, "sums to 1"),
        (i32(0, 0, 0), [0.2] * 5 + [0.0] * 5, "impossible"),
        (i32(0, 0, 0), [-0.1, 0.3] + [0.1] * 8, "sums to 1"),
    ],
)
def test_wrong_distributions_are_named(rows, distribution, words):
    wrong = drafts(
        [1, 2], [5, 6, 7], distributions=DraftDistributions(rows=rows, probabilities=np.array([distribution]))
    )
    assert words in " ".join(broken_distributions(wrong))


def test_distributions_may_be_tensors():
    torch = pytest.importorskip("torch")
    distributions = DraftDistributions(rows=i32(0, 0, 0), probabilities=torch.full((1, 10), 0.1, dtype=torch.bfloat16))
    assert broken_distributions(drafts([1, 2], [5, 6, 7], distributions=distributions)) == []
