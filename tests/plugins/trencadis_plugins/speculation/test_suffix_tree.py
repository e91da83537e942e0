"""The tree counts what a search through the texts counts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_plugins.speculation.suffix_tree import END, Node, SuffixTree

QUICK = settings(max_examples=200, phases=[Phase.explicit, Phase.generate])
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6)


def occurrences(texts: list[list[int]], run: list[int]) -> list[tuple[int, int]]:
    """Return where a run occurs, as text and index."""
    size = len(run)
    return [(t, i) for t, text in enumerate(texts) for i in range(len(text) - size + 1) if text[i : i + size] == run]


def followers(texts: list[list[int]], run: list[int], *, ended: bool) -> Counter[int]:
    found = [(texts[t], i + len(run)) for t, i in occurrences(texts, run)]
    return Counter(text[i] if i < len(text) else END for text, i in found if ended or i < len(text))


def check(tree: SuffixTree, texts: list[list[int]], depth: int, *, ended: bool) -> None:
    """Compare every run of tokens that the tree tells apart."""
    for size in range(1, depth):
        for run in itertools.product(range(3), repeat=size):
            place, expected = tree.locate(list(run)), occurrences(texts, list(run))
            if not expected:
                assert place is None
                continue
            follow = followers(texts, list(run), ended=ended)
            if not isinstance(place, Node):
                assert len(place) == len(expected)
                assert place == sorted(place)
                continue
            assert place.total == len(expected)
            assert place.total - place.num_open == follow.total()
            assert {token: count for count, _, token in place.ranked()} == dict(follow)
            latest = {token: max(s for s in expected if after(texts, s, size) == token) for token in follow}
            best = max(follow, key=lambda token, follow=follow, latest=latest: (follow[token], latest[token]))
            assert place.best() == (best, follow[best])


def after(texts: list[list[int]], place: tuple[int, int], size: int) -> int:
    text, at = texts[place[0]], place[1] + size
    return text[at] if at < len(text) else END


@QUICK
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), cut=st.integers(0, 60), depth=st.integers(2, 5))
def test_counts_of_a_growing_text_are_those_of_a_search(text, cut, depth):
    tree = SuffixTree(depth)
    tree.extend(text[:cut])
    tree.extend(text[cut:])
    assert tree.num_seen == len(text)
    check(tree, [text], depth, ended=False)


@QUICK
@given(texts=TEXTS, num_dropped=st.integers(0, 6), depth=st.integers(2, 5))
def test_counts_without_the_oldest_texts_are_those_of_the_others(texts, num_dropped, depth):
    tree = SuffixTree(depth)
    for text in texts:
        tree.extend(text)
        tree.end_text()
    for text in texts[:num_dropped]:
        tree.drop_text(len(text))
    left = texts[num_dropped:]
    assert tree.is_empty is (not left)
    check(tree, left, depth, ended=True)


@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_memory_of_dropped_texts_is_given_back(num_kept):
    tree = SuffixTree(8)
    for i in range(200):
        tree.extend([i % 7, i % 5, i % 3] * 4)
        tree.end_text()
        if i >= num_kept:
            tree.drop_text(12)
    assert len(tree.text) <= 2 * 13 * (num_kept + 1)
    assert tree.num_seen == 200 * 13


def test_best_is_found_again_when_its_text_is_dropped():
    tree = SuffixTree(4)
    for text in ([1, 2] * 6, [1, 3] * 4):
        tree.extend(text)
        tree.end_text()
    place = tree.locate([1])
    assert isinstance(place, Node)
    assert place.best() == (2, 6)
    tree.drop_text(12)
    tree.extend([1, 3])
    assert place.best() == (3, 5)


def test_most_of_a_text_is_not_spelt_out():
    """A hundred different tokens: one start each, and no node."""
    tree = SuffixTree(24)
    tree.extend(range(100))
    assert tree.locate([5, 6, 7]) == [5]
    assert not any(isinstance(child, Node) for child in tree._root.children.values())
