from __future__ import annotations

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, Speculator
from trencadis.records import DraftDistributions, Drafts
from trencadis_plugins.speculation import mixed
from trencadis_plugins.speculation.config import MixedConfig, SuffixConfig
from trencadis_plugins.speculation.mixed import Evidence, Mixed, Record, merged, part_of
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


def evidence(**options):
    return Evidence(2, **{"explore_every": 0, "prior_weight": 4.0, "memory": 32} | options)


def test_mean_lies_between_what_was_seen_and_the_prior():
    record = Record.empty(1)
    assert record.mean(0, 1.0, 4.0) == 1.0
    for _ in range(4):
        record.note(0, 3.0, memory=1e9)
    assert record.mean(0, 1.0, 4.0) == pytest.approx(2.0)
    assert record.mean(0, 1.0, 0.0) == pytest.approx(3.0)


def test_old_steps_count_a_third_after_the_memory():
    record = Record.empty(1)
    record.note(0, 1.0, memory=100)
    before = record.weights[0]
    for _ in range(100):
        record.note(0, 0.0, memory=100)
    assert record.totals[0] / before == pytest.approx(0.366, abs=0.001)


def test_member_that_accepts_more_is_chosen_and_the_first_of_equals():
    known, record = evidence(), Record.empty(2)
    assert known.choose(record, "t") == 0
    for _ in range(10):
        known.note(record, "t", 0, 0)
        known.note(record, "t", 1, 2)
    assert known.choose(record, "t") == 1


def test_new_request_begins_with_what_its_tenant_has_shown_and_nobody_elses():
    known, first = evidence(), Record.empty(2)
    for _ in range(20):
        known.note(first, "blue", 0, 0)
        known.note(first, "blue", 1, 3)
    assert known.choose(Record.empty(2), "blue") == 1
    assert known.choose(Record.empty(2), "green") == 0


def test_a_request_may_differ_from_its_tenant():
    known, of_tenant, own = evidence(), Record.empty(2), Record.empty(2)
    for _ in range(20):
        known.note(of_tenant, "t", 1, 3)
    for _ in range(20):
        known.note(own, "t", 1, 0)
        known.note(own, "t", 0, 2)
    assert known.choose(own, "t") == 0


def test_the_one_asked_least_is_tried_as_rarely_as_said():
    known, record = evidence(explore_every=8), Record.empty(2)
    chosen = []
    for _ in range(32):
        chosen.append(known.choose(record, "t"))
        known.note(record, "t", chosen[-1], 2 if chosen[-1] == 0 else 0)
    assert [i for i, member in enumerate(chosen) if member == 1] == [7, 15, 23, 31]


def test_memory_of_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(mixed, "_MAX_TENANTS", 3)
    known = evidence()
    for i in range(10):
        known.choose(Record.empty(2), i)
    assert list(known._tenants) == [7, 8, 9]


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
