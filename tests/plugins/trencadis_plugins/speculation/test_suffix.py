from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.errors import ConfigValueError
from trencadis.records import Request
from trencadis_plugins.speculation import suffix
from trencadis_plugins.speculation.config import SuffixConfig
from trencadis_plugins.speculation.suffix import Suffix
from trencadis_testing.speculation import SpeculationConformance, draft_view


class TestSuffix(SpeculationConformance):
    make = Suffix


class TestSuffixTrees(SpeculationConformance):
    def make(self):
        return Suffix(SuffixConfig(tree=True, factor=4.0, min_prob=0.0))


def request(**terms):
    return Request(request_id="r", prompt_token_ids=(1,), **terms)


def finish(made, tokens, **terms):
    """Let a request of this output come and go."""
    made.propose(draft_view([tokens[:2]], slots=[9], requests=[request(**terms)]))
    made.on_finished(slot=9, token_ids=np.array(tokens, np.int32))


def drafts_behind(made, tokens, most=8, **terms):
    drafts = made.propose(draft_view([tokens], most=most, requests=[request(**terms)]))
    return drafts.token_ids.tolist()


def test_a_sequence_is_drafted_from_itself():
    assert drafts_behind(Suffix(), [1, 2, 3, 4, 9, 1, 2, 3]) == [4, 9, 1]
    assert drafts_behind(Suffix(), [1, 2, 3]) == []


def test_a_sequence_is_drafted_from_the_outputs_of_its_tenant_only():
    made = Suffix()
    finish(made, [1, 2, 3, 4, 5], tenant="blue")
    assert drafts_behind(made, [8, 1, 2], tenant="blue") == [3, 4]
    assert drafts_behind(made, [8, 1, 2], tenant="green") == []
    assert drafts_behind(made, [8, 1, 2], tenant="blue", cache_salt="own") == []
    assert drafts_behind(made, [8, 1, 2], tenant="blue", adapter="poet") == []
    assert drafts_behind(made, [8, 1, 2], tenant="green", cache_salt="blue") == [3, 4]


def test_what_is_expected_to_bring_more_wins_and_the_sequence_itself_among_equals():
    made = Suffix()
    finish(made, [1, 2, 3, 4, 5])
    assert drafts_behind(made, [2, 7, 0, 1, 2]) == [3, 4]
    made.on_finished(slot=0, token_ids=np.empty(0, np.int32))
    assert drafts_behind(made, [1, 2, 6, 6, 0, 1, 2]) == [6, 6]


def test_prompts_are_not_remembered_for_others():
    made = Suffix()
    made.propose(draft_view([[1, 2, 3, 4, 5]], slots=[9]))
    made.on_finished(slot=9, token_ids=np.array([7], np.int32))
    assert drafts_behind(made, [1, 2, 3]) == []


def test_a_long_history_is_learnt_in_several_calls(monkeypatch):
    monkeypatch.setattr(suffix, "_MOST_LEARNT", 10)
    made = Suffix()
    tokens = [*range(40), 30, 31]
    view = draft_view([tokens], most=8)
    learnt = [made.propose(view).token_ids.tolist() for _ in range(5)]
    assert learnt == [[], [], [], [32, 33], [32, 33]]


def test_sequences_left_out_and_preempted_draft_as_if_they_had_not_been():
    tokens = np.random.default_rng(3).integers(0, 3, 200).tolist()
    made = Suffix()
    view = draft_view([tokens], most=8)
    for epoch, end in ((1, 50), (1, 51), (4, 120), (5, 200)):
        known = (np.array(tokens[:end], np.int32),)
        seen = made.propose(attrs.evolve(view, token_ids=known, epochs=np.array([epoch])))
        assert seen.token_ids.tolist() == drafts_behind(Suffix(), tokens[:end])


def test_trees_are_drafted_only_where_they_may_be():
    made = Suffix(SuffixConfig(tree=True, factor=4.0))
    assert made.drafts_trees
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    tree = made.propose(draft_view([text], most=3))
    assert sorted(tree.token_ids[tree.parents == -1].tolist()) == [3, 4]
    line = made.propose(draft_view([text], most=3, linear_only=True))
    assert line.parents.tolist() == list(range(-1, len(line.parents) - 1))
    assert not Suffix().drafts_trees
    assert Suffix().propose(draft_view([text])).parents is None


def test_nothing_is_kept_of_sequences_that_ended():
    made = Suffix(SuffixConfig(max_cached_requests=0))
    made.propose(draft_view([[1, 2, 1, 2], [3, 4]]))
    made.on_finished(slot=0, token_ids=np.array([1, 2], np.int32))
    assert (len(made._own), len(made._past)) == (1, 0)
    made.close()
    made.close()
    assert len(made._own) == 0


def test_trees_no_deeper_than_drafts_are_refused_by_name():
    with pytest.raises(ConfigValueError, match=r"\[speculation.suffix\] max_depth = 8: it must be above"):
        Suffix(SuffixConfig(max_depth=8))
