from __future__ import annotations

import math
from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import ConfigValueError
from trencadis.records import Request
from trencadis_plugins.speculation import suffix
from trencadis_plugins.speculation.config import SuffixConfig
from trencadis_plugins.speculation.suffix import NOTHING, PastOutputs, Search, Suffix
from trencadis_plugins.speculation.suffix_tree import END, SuffixTree
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


def test_a_sequence_is_drafted_from_the_outputs_of_its_tenant_only():
    made = Suffix()
    finish(made, [1, 2, 3, 4, 5], tenant="blue")
    assert drafts_behind(made, [8, 1, 2], tenant="blue") == [3, 4]
    assert drafts_behind(made, [8, 1, 2], tenant="green") == []
    assert drafts_behind(made, [8, 1, 2], tenant="blue", cache_salt="own") == []
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


def past(max_requests=10, max_tokens=100):
    return PastOutputs(max_depth=6, max_requests=max_requests, max_tokens=max_tokens)


def test_outputs_are_kept_apart_by_key():
    outputs = past()
    outputs.add("blue", [1, 2, 3])
    outputs.add("green", [1, 2, 4])
    assert outputs.tree("blue").locate([3]) is not None
    assert outputs.tree("blue").locate([4]) is None
    assert outputs.tree("red") is None


def test_oldest_request_of_all_goes_first_and_an_empty_key_with_it():
    outputs = past(max_requests=2)
    for key, token in (("blue", 1), ("green", 2), ("green", 3)):
        outputs.add(key, [token] * 4)
    assert outputs.tree("blue") is None
    assert outputs.tree("green").locate([2, 2]) is not None
    assert (len(outputs), outputs.num_tokens) == (2, 8)


def test_tokens_are_bounded_too_and_a_long_output_keeps_its_end():
    outputs = past(max_tokens=10)
    outputs.add("a", list(range(8)))
    outputs.add("a", list(range(20, 25)))
    assert outputs.num_tokens == 5
    outputs.add("b", list(range(100)))
    assert outputs.num_tokens == 10
    assert outputs.tree("a") is None
    assert outputs.tree("b").locate([89]) is None
    assert outputs.tree("b").locate([90]) is not None


@pytest.mark.parametrize("limits", [{"max_requests": 0}, {"max_tokens": 0}])
def test_nothing_is_kept_where_a_limit_is_zero(limits):
    outputs = past(**limits)
    outputs.add("a", [1, 2, 3])
    assert (len(outputs), outputs.num_tokens, outputs.tree("a")) == (0, 0, None)


def test_empty_outputs_count_for_nothing_and_clear_forgets_all():
    outputs = past()
    outputs.add("a", [])
    assert len(outputs) == 0
    outputs.add("a", [1])
    outputs.clear()
    assert (len(outputs), outputs.num_tokens, outputs.tree("a")) == (0, 0, None)


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
