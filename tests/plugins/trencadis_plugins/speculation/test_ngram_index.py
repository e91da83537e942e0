"""The index finds what a search through the whole text finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_plugins.speculation import ngram_index
from trencadis_plugins.speculation.ngram_index import NgramIndex

QUICK = settings(max_examples=300, phases=[Phase.explicit, Phase.generate])


def found_by_search(tokens: list[int], low: int, high: int, *, earliest: bool) -> int:
    """Return the index behind the longest earlier occurrence of the text's end, 0 if there is none."""
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends:
            return ends[0] if earliest else ends[-1]
    return 0


@QUICK
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    earliest=st.booleans(),
)
def test_index_that_grows_finds_what_a_search_finds(tokens, cuts, low, more, earliest):
    index = NgramIndex(low, low + more, earliest=earliest)
    ends = sorted({*np.minimum(np.cumsum(cuts), len(tokens)).tolist(), len(tokens)})
    for end in ends:
        known = tokens[:end]
        expected = found_by_search(known, low, low + more, earliest=earliest)
        assert index.find(np.array(known, np.int32)) == expected


@pytest.mark.parametrize("vocab_size", [2, 50, 200_000])
@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_long_texts_are_found_too_however_they_come(vocab_size, chunk):
    """More tokens than it first has room for, learnt one by one and in bulk."""
    tokens = np.random.default_rng(chunk).integers(0, vocab_size, 1500).astype(np.int32)
    index = NgramIndex(2, 4)
    for end in [*range(1, 1500, chunk), 1500]:
        found = index.find(tokens[:end])
        if end % 97 == 0 or end == 1500:
            assert found == found_by_search(tokens[:end].tolist(), 2, 4, earliest=False)


def test_different_runs_of_one_hash_are_not_confused(monkeypatch):
    """All n-grams in one bucket: slow, and still right."""
    monkeypatch.setattr(ngram_index, "_codes", lambda last: [0] * (len(last) + 1))
    monkeypatch.setattr(ngram_index, "_SPREAD", 0)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 4, 200).astype(np.int32)
    index = NgramIndex(2, 4)
    for end in range(1, 200):
        assert index.find(tokens[:end]) == found_by_search(tokens[:end].tolist(), 2, 4, earliest=False)


def test_asking_twice_changes_nothing():
    index = NgramIndex(1, 2)
    tokens = np.array([5, 6, 5], np.int32)
    assert [index.find(tokens) for _ in range(3)] == [1, 1, 1]
    assert index.num_tokens == 3
