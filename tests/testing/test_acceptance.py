"""The suite notices broken acceptance rules: each is a built-in one with one planted fault."""

from __future__ import annotations

import attrs
import pytest
import torch

from support.mutants import broken, proofs
from trencadis_gallery.acceptance.synthetic import Synthetic
from trencadis_plugins.acceptance import drafted, tree
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


class _UntruncatedTarget(Token):
    """Judges by a distribution that still has what truncation took away."""

    def accept(self, verification):
        whole = (verification.target + 0.05) / (1 + 0.05 * verification.target.shape[-1])
        return super().accept(attrs.evolve(verification, target=whole))


class _CertainDraftsAlwaysStand(Token):
    """A draft without a distribution is waved through."""

    def accept(self, verification):
        certain = drafted.are_real(verification) & ~drafted.are_drawn(verification)
        return torch.where(certain, 1.0, super().accept(verification))


class _NoiseOfSinglePrecision(Token):
    """Where nothing is left, rounding decides: not even the possible tokens."""

    def last(self, verification, stops):
        distribution = drafted.distribution_of(verification, stops)
        return (drafted.target_at(verification, stops) - distribution).abs() + 1e-4


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


MUTANTS = {
    "test_drawn_drafts_leave_the_distribution_of_the_model": [
        _ResidualFromTheTarget,
        broken("TypicalThatDeniesIt", Typical, lossless=True),
    ],
    "test_truncated_distributions_are_kept": [_UntruncatedTarget],
    "test_certain_drafts_leave_the_distribution_of_the_model": [_CertainDraftsAlwaysStand],
    "test_padding_is_never_accepted_and_changes_nothing": [
        broken(
            "AcceptsPadding",
            Token,
            accept=lambda self, verification: drafted.ratios(
                drafted.target_chances(verification), drafted.chances(verification)
            ),
        )
    ],
    "test_shares_and_weights_are_in_range": [
        broken(
            "NothingIsLeft",
            Token,
            last=lambda self, verification, stops: (
                drafted.target_at(verification, stops) - drafted.distribution_of(verification, stops)
            ).clamp(min=0),
        )
    ],
    "test_distributions_of_single_precision_are_kept_as_well_as_can_be": [_NoiseOfSinglePrecision],
    "test_a_sequence_is_judged_by_itself": [
        broken(
            "ByTheMeanOfTheBatch",
            Token,
            accept=lambda self, verification: (
                Token.accept(self, verification).mean(0, keepdim=True).expand(verification.tokens.shape)
            ),
        )
    ],
    "test_it_is_pure": [_WorksInPlace, _CountsItsCalls],
    "test_siblings_drawn_without_replacement_leave_the_distribution_of_the_model": [_EachSiblingForItself],
    "test_certain_siblings_beside_drawn_ones_leave_the_distribution_of_the_model": [_CertainSiblingsTakeFromTheDraw],
    "test_equal_siblings_are_no_more_than_one": [_SharesBeyondOne],
    "test_greedy_text_is_that_of_the_model": [broken("SyntheticThatDeniesIt", Synthetic, lossless=True)],
    "test_certain_siblings_leave_the_distribution_of_the_model": [broken("ChainsOnly", Token, supports_trees=True)],
}


class _Suite(AcceptanceConformance):
    tensor = staticmethod(torch.from_numpy)


test_suite_fails_what_is_broken, _ = proofs(_Suite, MUTANTS)


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
