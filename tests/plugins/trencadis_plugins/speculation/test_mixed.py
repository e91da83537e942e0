from __future__ import annotations

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import load_config
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, Speculator
from trencadis.records import Drafts
from trencadis.registry import Registry, resolve_plan
from trencadis_plugins.speculation.config import MixedConfig, SuffixConfig
from trencadis_plugins.speculation.mixed import Mixed
from trencadis_plugins.speculation.ngram import Ngram
from trencadis_plugins.speculation.suffix import Suffix
from trencadis_testing.speculation import SpeculationConformance, draft_view


class Member(Speculator):
    """Drafts its own token as often as it is told to, and notes what it hears."""

    def __init__(self, token, *, most=3, silent=(), size=0):
        self.token, self.max_draft_tokens, self.silent, self.size = token, most, set(silent), size
        self.asked, self.heard, self.told = [], [], []

    @property
    def kv_bytes_per_token(self):
        return self.size

    def allocate(self, limits):
        self.told.append(("allocate", limits))

    def propose(self, view):
        self.asked.append(view.slots.tolist())
        assert (view.max_draft_tokens <= self.max_draft_tokens).all()
        counts = np.where(np.isin(view.slots, list(self.silent)), 0, view.max_draft_tokens).astype(np.int32)
        return Drafts(num_drafts=counts, token_ids=np.full(counts.sum(), self.token, np.int32))

    def on_verified(self, *, slots, num_drafts, num_accepted):
        self.heard.append((slots.tolist(), num_drafts.tolist(), num_accepted.tolist()))

    def on_finished(self, *, slot, token_ids):
        self.told.append(("finished", slot, token_ids.tolist()))

    def close(self):
        self.told.append("close")


def mixture(*members, **options):
    by_name = {f"member_{i}": member for i, member in enumerate(members)}
    context = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda noun, name: by_name[name])
    return Mixed(MixedConfig(members=tuple(by_name), **options), context)


class TestMixed(SpeculationConformance):
    def make(self):
        return mixture(Ngram(), Suffix())


class TestMixedTrees(SpeculationConformance):
    def make(self):
        return mixture(Ngram(), Suffix(SuffixConfig(tree=True, factor=4.0)), explore_every=3)


def verify(made, view, drafts, accepted):
    accepted = np.minimum(drafts.num_drafts, accepted).astype(np.int32)
    made.on_verified(slots=view.slots, num_drafts=drafts.num_drafts, num_accepted=accepted)


def test_each_request_gets_the_member_that_is_right_for_it():
    """Member 0 is right for slot 4, member 1 for slot 2; who is asked follows."""
    zero, one = Member(10), Member(11)
    made = mixture(zero, one, explore_every=4)
    view = draft_view([[1], [2]], most=3, slots=[4, 2])
    for _ in range(40):
        drafts = made.propose(view)
        firsts = drafts.token_ids[[0, 3]]
        verify(made, view, drafts, np.where(firsts == [10, 11], 3, 0))
    assert made.propose(view).token_ids.tolist() == [10] * 3 + [11] * 3


def test_a_member_with_nothing_to_say_is_followed_by_the_next_one():
    zero, one = Member(10, silent=[4]), Member(11, most=2)
    made = mixture(zero, one, explore_every=0)
    drafts = made.propose(draft_view([[1], [2]], most=3, slots=[4, 2]))
    assert drafts.num_drafts.tolist() == [2, 3]
    assert drafts.token_ids.tolist() == [11, 11, 10, 10, 10]
    assert (zero.asked, one.asked) == ([[4, 2]], [[4]])


def test_only_the_chosen_member_is_asked():
    zero, one = Member(10), Member(11)
    mixture(zero, one).propose(draft_view([[1], [2]], most=3))
    assert (len(zero.asked), one.asked) == (1, [])


def test_verdicts_go_to_the_member_that_drafted():
    zero, one = Member(10, silent=[4]), Member(11)
    made = mixture(zero, one, explore_every=0)
    view = draft_view([[1], [2], [3]], most=[3, 2, 0], slots=[4, 2, 9])
    drafts = made.propose(view)
    assert drafts.num_drafts.tolist() == [3, 2, 0]
    verify(made, view, drafts, [1, 2, 0])
    assert zero.heard == [([2], [2], [2])]
    assert one.heard == [([4], [3], [1])]
    verify(made, view, drafts, [1, 2, 0])
    assert len(zero.heard) == len(one.heard) == 1, "a verdict counts once"


def test_members_are_told_of_sizes_and_ends_and_are_closed():
    zero, one = Member(10, size=5), Member(11, most=7, size=6)
    made = mixture(zero, one)
    assert (made.max_draft_tokens, made.kv_bytes_per_token, made.drafts_trees) == (7, 11, False)
    made.allocate("limits")
    made.on_finished(slot=3, token_ids=np.array([1, 2], np.int32))
    made.close()
    for member in (zero, one):
        assert member.told == [("allocate", "limits"), ("finished", 3, [1, 2]), "close"]


def test_one_member_that_drafts_trees_makes_them_all_trees():
    assert mixture(Ngram(), Suffix(SuffixConfig(tree=True))).drafts_trees


def test_a_member_named_twice_is_refused():
    with pytest.raises(ConfigValueError, match=r"\[speculation.mixed\] members = \['ngram', 'ngram'\]: a member"):
        Mixed(MixedConfig(members=("ngram", "ngram")), ComponentContext(clock=SimulatedClock(), seed=0))


def test_members_get_their_own_tables():
    registry = Registry.discover()
    overrides = {"speculation.name": "mixed", "speculation.mixed.members": ["suffix", "ngram"]}
    overrides |= {"speculation.ngram.max_draft_tokens": 6}
    config = load_config(components=registry.config_classes(), environ={}, overrides=overrides).config
    plan = resolve_plan(config, registry)
    assert set(plan.inner) >= {"speculation.mixed.members[0]", "speculation.mixed.members[1]"}
    assert plan.inner_choice("speculation", "ngram").options.max_draft_tokens == 6
