from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import ConfigValueError
from trencadis_plugins.speculation import ngram
from trencadis_plugins.speculation.config import NgramConfig
from trencadis_plugins.speculation.ngram import Ngram, NgramIndex
from trencadis_testing.speculation import SpeculationConformance, draft_view


class TestNgram(SpeculationConformance):
    make = Ngram


class TestNgramOfOneToken(SpeculationConformance):
    def make(self):
        return Ngram(NgramConfig(min_match=1, max_match=1, max_draft_tokens=9, occurrence="earliest"))


def drafts_of(tokens, most, **options):
    made = Ngram(NgramConfig(max_draft_tokens=most, **options))
    return made.propose(draft_view([tokens], most=most)).token_ids.tolist()


@pytest.mark.parametrize(
    ("tokens", "low", "high", "most", "drafts"),
    [
        ([1, 2, 3, 4, 2, 3], 2, 3, 4, [4, 2, 3]),
        ([1, 2, 3] * 3, 2, 3, 4, [1, 2, 3, 1]),
        ([5, 6, 7, 5, 6, 8, 5, 6], 1, 2, 2, [7, 5]),
        ([1, 1, 1, 1], 1, 3, 2, [1]),
        ([1, 2, 3], 2, 2, 3, []),
        ([9, 1, 2, 9, 1, 2, 3, 9, 1, 2], 3, 3, 5, [9, 1, 2, 3, 9]),
    ],
)
def test_earliest_occurrence_gives_the_published_drafts(tokens, low, high, most, drafts):
    """Vectors of vLLM's prompt look-up."""
    options = {"occurrence": "earliest", "continue_period": False}
    assert drafts_of(tokens, most, min_match=low, max_match=high, **options) == drafts


def test_latest_occurrence_wins_and_a_longer_run_before_it():
    assert drafts_of([5, 6, 7, 5, 6, 8, 5, 6], 2, min_match=1) == [8, 5]
    assert drafts_of([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == [9]


def test_text_that_repeats_itself_is_drafted_on_as_it_does():
    assert drafts_of([1, 2, 3] * 3, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafts_of([1, 2, 3] * 3, 7, continue_period=False) == [1, 2, 3]
    assert drafts_of([7, 7, 7], 4) == [7, 7, 7, 7]


def test_more_is_not_drafted_than_the_view_allows():
    made = Ngram()
    drafts = made.propose(draft_view([[1, 2] * 5, [1, 2] * 5, [1, 2] * 5], most=[0, 2, 9]))
    assert drafts.num_drafts.tolist() == [0, 2, 4]


def test_a_sequence_that_was_left_out_and_preempted_catches_up():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 4, 300).tolist()
    made = Ngram()
    view = draft_view([tokens])
    for epoch, end in ((1, 50), (1, 51), (4, 190), (5, 300)):
        known = (np.array(tokens[:end], np.int32),)
        seen = made.propose(attrs.evolve(view, token_ids=known, epochs=np.array([epoch])))
        assert seen.token_ids.tolist() == drafts_of(tokens[:end], 4)


def test_nothing_is_kept_of_sequences_that_ended():
    made = Ngram()
    made.propose(draft_view([[1, 2, 1, 2], [3, 4]]))
    made.on_finished(slot=0, token_ids=np.empty(0, np.int32))
    assert len(made._indexes) == 1
    made.close()
    made.close()
    assert len(made._indexes) == 0


def test_a_shortest_run_above_the_longest_is_refused_by_name():
    with pytest.raises(ConfigValueError, match=r"\[speculation.ngram\] min_match = 5: it is above max_match = 4"):
        Ngram(NgramConfig(min_match=5))


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
    monkeypatch.setattr(ngram, "_codes", lambda last: [0] * (len(last) + 1))
    monkeypatch.setattr(ngram, "_SPREAD", 0)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 4, 200).astype(np.int32)
    index = NgramIndex(2, 4)
    for end in range(1, 200):
        assert index.find(tokens[:end]) == found_by_search(tokens[:end].tolist(), 2, 4, earliest=False)
