"""The search finds what its definition says, computed from the bare text."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_plugins.speculation.suffix_search import NOTHING, Search
from trencadis_plugins.speculation.suffix_tree import END, SuffixTree

QUICK = settings(max_examples=200, phases=[Phase.explicit, Phase.generate])


def tree_of(*texts, depth=24, ended=True):
    tree = SuffixTree(depth)
    for text in texts:
        tree.extend(text)
        if ended:
            tree.end_text()
    return tree


def search(**options):
    return Search(**{"max_depth": 24, "factor": 1.0, "offset": 0.0, "min_prob": 0.1} | options)


def next_tokens(text: list[int], run: list[int]) -> list[int]:
    """Return what followed a run, in order of time."""
    size = len(run)
    return [text[i + size] for i in range(len(text) - size) if text[i : i + size] == run]


def path_by_definition(text: list[int], run: list[int], budget: int, min_prob: float) -> tuple[float, list[int]]:
    probability, score, path = 1.0, 0.0, []
    while len(path) < budget:
        follow = next_tokens(text, run + path)
        if not follow:
            break
        counts = Counter(follow)
        token = max(reversed(follow), key=counts.__getitem__)
        probability *= counts[token] / len(follow)
        if token == END or probability < min_prob:
            break
        path.append(token)
        score += probability
    return score, path


def best_by_definition(text: list[int], last: list[int], most: int, how: Search) -> tuple[float, list[int]]:
    best: tuple[float, list[int]] = (0.0, [])
    for size in range(min(how.longest(most), len(last)), 0, -1):
        budget = min(most, math.floor(how.factor * size + how.offset), how.max_depth - size)
        found = path_by_definition(text, last[-size:], budget, how.min_prob)
        if found[0] > best[0]:
            best = found
    return best


@QUICK
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    most=st.integers(1, 6),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_drafts_behind_a_text_are_those_of_the_definition(text, most, factor, offset, min_prob):
    how = search(max_depth=9, factor=factor, offset=offset, min_prob=min_prob)
    found = how.find(tree_of(text, depth=9, ended=False), text, most)
    score, path = best_by_definition(text, text, most, how)
    assert math.isclose(found.score, score)
    assert list(found.tokens) == path


@QUICK
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    last=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    most=st.integers(1, 6),
)
def test_drafts_from_other_texts_are_those_of_the_definition(texts, last, most):
    how = search(max_depth=10)
    joined = [token for text in texts for token in (*text, END)]
    found = how.find(tree_of(*texts, depth=10), last, most)
    score, path = best_by_definition(joined, last, most, how)
    assert math.isclose(found.score, score)
    assert list(found.tokens) == path


@QUICK
@given(
    text=st.lists(st.integers(0, 2), min_size=2, max_size=50),
    most=st.integers(1, 8),
    least=st.sampled_from([0.0, 0.7, 1.5]),
)
def test_least_only_leaves_out_what_does_not_exceed_it(text, most, least):
    tree, how = tree_of(text, ended=False), search()
    whole, cut = how.find(tree, text, most), how.find(tree, text, most, least=least)
    assert cut == (whole if whole.score > least else NOTHING)


@QUICK
@given(text=st.lists(st.integers(0, 3), min_size=2, max_size=60), most=st.integers(1, 8))
def test_trees_hold_the_most_probable_paths(text, most):
    """Parents first, siblings differ, no path left out is more probable than one that was taken, and it beats a line."""
    tree, how = tree_of(text, ended=False), search(factor=8.0)
    found, line = how.find(tree, text, most, branch=True), how.find(tree, text, most)
    assert len(found.tokens) == len(found.parents) <= most
    assert found.score >= line.score - 1e-9
    assert all(parent < i for i, parent in enumerate(found.parents))
    siblings = list(zip(found.parents, found.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)


def test_tree_has_the_probabilities_of_its_paths():
    """Behind 1 came 2 twice and 3 once; behind 1 2 came 4 and 5."""
    tree = tree_of([1, 2, 4], [1, 2, 5], [1, 3, 6])
    found = search(factor=9.0).find(tree, [1], 6, branch=True)
    assert found.score == pytest.approx(2 / 3 + 1 / 3 + 1 / 3 + 1 / 3 + 1 / 3)
    assert sorted(zip(found.parents, found.tokens, strict=True))[:2] == [(-1, 2), (-1, 3)]
    assert search(factor=9.0, min_prob=0.5).find(tree, [1], 6, branch=True).tokens == [2]


def test_an_end_is_never_drafted_and_counts_against_what_follows():
    tree = tree_of([1, 2], [1, 2], [1, 2, 3])
    assert search(factor=3.0, min_prob=0.0).find(tree, [1], 5) == (1.0, [2], ())
    assert search(factor=3.0, min_prob=0.0).find(tree, [1], 5, branch=True).tokens == [2, 3]


def test_nothing_known_gives_no_drafts():
    assert search().find(SuffixTree(24), [1, 2, 3], 4) == NOTHING
    assert search().find(tree_of([1, 2, 3]), [9], 4) == NOTHING
    assert search().find(tree_of([1, 2, 3]), [], 4) == NOTHING


def test_a_longer_match_wins_where_scores_are_equal():
    """Behind 5 1 2 came 3; behind 1 2 alone always 4 as well, later: both are certain for one draft."""
    tree = tree_of([5, 1, 2, 3, 0, 9, 1, 2, 4])
    assert search().find(tree, [5, 1, 2], 1).tokens == [3]
