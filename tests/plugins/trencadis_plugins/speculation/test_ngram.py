from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.errors import ConfigValueError
from trencadis_plugins.speculation.config import NgramConfig
from trencadis_plugins.speculation.ngram import Ngram
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
