"""The suite notices broken acceptance rules: each is a built-in one with one planted fault."""

from __future__ import annotations

import attrs
import pytest
import torch

from trencadis_gallery.acceptance.synthetic import Synthetic
from trencadis_plugins.acceptance import block, drafted, tree
from trencadis_plugins.acceptance.block import Block
from trencadis_plugins.acceptance.match import Match
from trencadis_plugins.acceptance.token import Token
from trencadis_plugins.acceptance.tree import Tree
from trencadis_plugins.acceptance.typical import Typical
from trencadis_testing.acceptance import AcceptanceConformance


class _ResidualFromTheTarget(Token):
    """Behind a refused draft it draws from p, and not from what is left of it."""

    def last(self, verification, stops):
        return drafted.target_at(verification, stops)


class _WrongTemperature(Token):
    """Takes the drafter's distribution at another temperature than the drafter did."""

    def _tempered(self, verification):
        if verification.proposal is None:
            return verification
        warm = verification.proposal**0.7
        total = warm.sum(-1, keepdim=True)
        return attrs.evolve(verification, proposal=torch.where(total > 0, warm / total.clamp(min=1e-9), warm))

    def accept(self, verification):
        return super().accept(self._tempered(verification))

    def last(self, verification, stops):
        return super().last(self._tempered(verification), stops)


class _BonusAfterARefusal(Token):
    """The last token always has the distribution behind the last draft."""

    def last(self, verification, stops):
        return super().last(verification, verification.num_drafts)


class _ResidualOfThePositionBehind(Token):
    def last(self, verification, stops):
        return super().last(verification, torch.minimum(stops + 1, verification.num_drafts))


class _UntruncatedTarget(Token):
    """Judges by a distribution that still has what truncation took away."""

    def accept(self, verification):
        whole = (verification.target + 0.05) / (1 + 0.05 * verification.target.shape[-1])
        return super().accept(attrs.evolve(verification, target=whole))


class _AcceptsWithTheRatioTurnedRound(Token):
    def accept(self, verification):
        turned = drafted.ratios(drafted.chances(verification), drafted.target_chances(verification))
        return torch.where(drafted.are_real(verification), turned, 0.0)


class _CertainDraftsAlwaysStand(Token):
    """A draft without a distribution is waved through."""

    def accept(self, verification):
        certain = drafted.are_real(verification) & ~drafted.are_drawn(verification)
        return torch.where(certain, 1.0, super().accept(verification))


class _CertainDraftsAreDrawnAgain(Token):
    """What was certain and refused may come again."""

    def last(self, verification, stops):
        distribution = drafted.distribution_of(verification, stops) * (verification.proposal is not None)
        return drafted.leftover(drafted.target_at(verification, stops), distribution)


class _AcceptsPadding(Token):
    def accept(self, verification):
        return drafted.ratios(drafted.target_chances(verification), drafted.chances(verification))


class _NothingIsLeft(Token):
    """Leaves no weight where model and drafter agree."""

    def last(self, verification, stops):
        return (drafted.target_at(verification, stops) - drafted.distribution_of(verification, stops)).clamp(min=0)


class _NoiseOfSinglePrecision(Token):
    """Where nothing is left, rounding decides: not even the possible tokens."""

    def last(self, verification, stops):
        distribution = drafted.distribution_of(verification, stops)
        return (drafted.target_at(verification, stops) - distribution).abs() + 1e-4


class _ByTheMeanOfTheBatch(Token):
    def accept(self, verification):
        return super().accept(verification).mean(0, keepdim=True).expand(verification.tokens.shape)


class _WorksInPlace(Token):
    def accept(self, verification):
        shares = super().accept(verification)
        verification.target.mul_(0.5)
        return shares


class _CountsItsCalls(Token):
    num_calls = 0

    def accept(self, verification):
        self.num_calls += 1
        return super().accept(verification) * 0.999**self.num_calls


class _BlockWithoutCumulativeWeights(Block):
    """Each draft's own ratio instead of that of the run."""

    def accept(self, verification):
        return self._with_own_weights(super().accept, verification)

    def last(self, verification, stops):
        return self._with_own_weights(
            lambda one: super(_BlockWithoutCumulativeWeights, self).last(one, stops), verification
        )

    def _with_own_weights(self, call, verification):
        plain, block._weights = block._weights, self._own
        try:
            return call(verification)
        finally:
            block._weights = plain

    def _own(self, verification):
        ratios = drafted.ratios(drafted.target_chances(verification), drafted.chances(verification))
        return torch.cat([torch.ones_like(ratios[:, :1]), ratios], dim=1)


class _BlockThatForgetsTheWeightAtTheEnd(Block):
    def last(self, verification, stops):
        return drafted.leftover(drafted.target_at(verification, stops), drafted.distribution_of(verification, stops))


class _BlockThatStopsAtTheFirst(Block):
    """The chances of runs as if they were chances of drafts."""

    def accept(self, verification):
        return block._passes(verification, block._weights(verification))


class _SiblingsWithReplacement(Tree):
    """Takes each sibling's distribution as that of a first draw."""

    def accept(self, verification):
        return self._plain(super().accept, verification)

    def last(self, verification, stops):
        return self._plain(lambda one: super(_SiblingsWithReplacement, self).last(one, stops), verification)

    def _plain(self, call, verification):
        real, tree._drawn_before = tree._drawn_before, lambda one: torch.zeros_like(drafted.earlier_siblings(one))
        try:
            return call(verification)
        finally:
            tree._drawn_before = real


class _CertainSiblingsTakeFromTheDraw(Tree):
    """A certain draft counts as drawn: its siblings are said to have been drawn from the rest."""

    def accept(self, verification):
        real, tree._drawn_before = tree._drawn_before, drafted.earlier_siblings
        try:
            return super().accept(verification)
        finally:
            tree._drawn_before = real


class _EachSiblingForItself(Tree):
    """Forgets that siblings before it were refused."""

    def accept(self, verification):
        shares = drafted.ratios(drafted.target_chances(verification), drafted.chances(verification))
        return torch.where(drafted.are_real(verification), shares, 0.0)


class _SharesBeyondOne(Match):
    """Equal siblings stand twice."""

    def accept(self, verification):
        hits = verification.sampled.gather(1, verification.parents) == verification.tokens
        return (hits & drafted.are_real(verification)).double()


class _ComparesWithTheNextSample(Match):
    def accept(self, verification):
        return super().accept(attrs.evolve(verification, sampled=verification.sampled.roll(-1, 1)))


class _TypicalThatDeniesIt(Typical):
    lossless = True


class _SyntheticThatDeniesIt(Synthetic):
    lossless = True


class _ChainsOnly(Token):
    """Says that it takes trees."""

    supports_trees = True


_TESTS_THAT_NOTICE = {
    _ResidualFromTheTarget: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _WrongTemperature: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _BonusAfterARefusal: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _ResidualOfThePositionBehind: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _AcceptsWithTheRatioTurnedRound: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _UntruncatedTarget: "test_truncated_distributions_are_kept",
    _CertainDraftsAlwaysStand: "test_certain_drafts_leave_the_distribution_of_the_model",
    _CertainDraftsAreDrawnAgain: "test_certain_drafts_leave_the_distribution_of_the_model",
    _AcceptsPadding: "test_padding_is_never_accepted_and_changes_nothing",
    _NothingIsLeft: "test_shares_and_weights_are_in_range",
    _NoiseOfSinglePrecision: "test_distributions_of_single_precision_are_kept_as_well_as_can_be",
    _ByTheMeanOfTheBatch: "test_a_sequence_is_judged_by_itself",
    _WorksInPlace: "test_it_is_pure",
    _CountsItsCalls: "test_it_is_pure",
    _BlockWithoutCumulativeWeights: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _BlockThatForgetsTheWeightAtTheEnd: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _BlockThatStopsAtTheFirst: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _SiblingsWithReplacement: "test_siblings_drawn_without_replacement_leave_the_distribution_of_the_model",
    _EachSiblingForItself: "test_siblings_drawn_without_replacement_leave_the_distribution_of_the_model",
    _CertainSiblingsTakeFromTheDraw: "test_certain_siblings_beside_drawn_ones_leave_the_distribution_of_the_model",
    _SharesBeyondOne: "test_equal_siblings_are_no_more_than_one",
    _ComparesWithTheNextSample: "test_certain_drafts_leave_the_distribution_of_the_model",
    _TypicalThatDeniesIt: "test_drawn_drafts_leave_the_distribution_of_the_model",
    _SyntheticThatDeniesIt: "test_greedy_text_is_that_of_the_model",
    _ChainsOnly: "test_certain_siblings_leave_the_distribution_of_the_model",
}


class _Suite(AcceptanceConformance):
    tensor = staticmethod(torch.from_numpy)


@pytest.mark.parametrize(
    ("mutant", "test"), _TESTS_THAT_NOTICE.items(), ids=[mutant.__name__.strip("_") for mutant in _TESTS_THAT_NOTICE]
)
def test_a_planted_fault_is_noticed(failures_of, mutant, test):
    assert failures_of(_Suite, mutant, only=test) == {test}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Match, Token, Block, Tree, Typical, Synthetic])
def test_the_rules_without_the_faults_pass(failures_of, rule):
    assert failures_of(_Suite, rule) == set()


def test_a_distribution_that_is_not_the_models_is_named_with_its_distance():
    suite = type("Suite", (_Suite,), {"make": _ResidualFromTheTarget})()
    with pytest.raises(AssertionError, match=r"total variation; 1e-12 are allowed"):
        suite.test_drawn_drafts_leave_the_distribution_of_the_model(0, 2)


def test_a_lossy_rule_is_spared_the_tests_of_distributions_and_no_others():
    suite = type("Suite", (_Suite,), {"make": Typical})()
    with pytest.raises(pytest.skip.Exception, match="declared lossy"):
        suite.test_drawn_drafts_leave_the_distribution_of_the_model(0, 2)
    suite.test_it_is_pure()


def test_methods_that_are_missing_are_named():
    for call in (lambda suite: suite.make(), lambda suite: suite.tensor(None)):
        with pytest.raises(NotImplementedError, match="AcceptanceConformance needs a method"):
            call(AcceptanceConformance())
