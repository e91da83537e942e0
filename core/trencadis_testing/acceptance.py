"""Conformance suite of the noun ``acceptance``.

    import torch
    from trencadis_testing import AcceptanceConformance

    class TestMyRule(AcceptanceConformance):
        make = MyRule
        tensor = staticmethod(torch.from_numpy)

No statistics: a rule draws nothing, so that the distribution of what it emits is enumerated, over all drafts of small worlds. The suite needs
no tensor library of its own: arrays go in through ``tensor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

from trencadis.interfaces import AcceptanceRule, Verification, legal
from trencadis_testing.acceptance_scenes import (
    Scene,
    distributions,
    emission,
    greedy,
    model_distribution,
    verification_of,
)

if TYPE_CHECKING:
    import torch

__all__ = ["AcceptanceConformance"]

_TREES = ((0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 0, 2, 2), (0, 0, 1, 3))
"""Node before each draft: siblings at the root, in the middle, at the end, in two places, and drafts out of the order of depth."""

_NO_DRAWS = frozenset(range(9))


class AcceptanceConformance:
    """What every acceptance rule promises. Inherit from it, name the class ``Test...``, and say how to make one.

    A rule that declares itself lossy is spared the tests of distributions, one that takes no trees those of trees.

    Attributes:
        tolerance: Most total variation between the emitted distribution and the model's, times 1e-15; more only for a device that has no float64.
    """

    tolerance: int = 1000

    def make(self) -> AcceptanceRule:
        """Return a new rule."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self) that returns an acceptance rule")

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return an array of float64, float32 or int64 as a tensor on the device to test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tensor(self, array)")

    # ------------------------------------------------------------------------------------------------- distributions

    @pytest.mark.parametrize("num_drafts", [1, 2, 3])
    @pytest.mark.parametrize("seed", range(3))
    def test_drawn_drafts_leave_the_distribution_of_the_model(self, seed: int, num_drafts: int) -> None:
        """A chain, each draft drawn by a distribution of its own."""
        self._assert_distribution(_chain(seed, num_drafts))

    @pytest.mark.parametrize("num_drafts", [1, 2, 3])
    @pytest.mark.parametrize("seed", range(3))
    def test_certain_drafts_leave_the_distribution_of_the_model(self, seed: int, num_drafts: int) -> None:
        """Drafts without a draw, as looked-up ones are."""
        scene = attrs.evolve(_chain(seed, num_drafts), certain=frozenset(range(num_drafts)))
        self._assert_distribution(scene)

    @pytest.mark.parametrize("certain", [{0}, {1}, {2}, {0, 2}, {1, 2}])
    def test_certain_and_drawn_drafts_in_one_chain_leave_the_distribution_of_the_model(self, certain: set[int]) -> None:
        """Some drafts were drawn, others not."""
        self._assert_distribution(attrs.evolve(_chain(11, 3), certain=frozenset(certain)))

    @pytest.mark.parametrize("impossible", [(1, 0), (0, 1), (1, 1), (2, 1)])
    def test_truncated_distributions_are_kept(self, impossible: tuple[int, int]) -> None:
        """Tokens that the model's distribution, or the drafter's, does not have: such a draft never stands, such a token may follow."""
        model, drafter = impossible
        for seed in range(3):
            target = distributions(20 + seed, 3, num_impossible=model)
            self._assert_distribution(_chain(seed, 2, target=target, num_impossible=drafter))

    @pytest.mark.parametrize("certain", [frozenset[int](), _NO_DRAWS])
    def test_greedy_text_is_that_of_the_model(self, certain: frozenset[int]) -> None:
        """The model's distribution gives everything to one token; so does the emitted one."""
        for seed in range(4):
            scene = _chain(seed, 3, target=greedy(distributions(seed, 3)))
            self._assert_distribution(attrs.evolve(scene, certain=certain & frozenset(range(3))))

    def test_distributions_of_single_precision_are_kept_as_well_as_can_be(self) -> None:
        """What devices compute with; a distribution that nothing is left of must not become noise."""
        rule = self._lossless()
        if not rule.needs_distributions:
            pytest.skip("this rule is shown no distributions")
        for seed in range(4):
            same = distributions(1000 + seed, 3)
            for scene in (_chain(seed, 3), attrs.evolve(_chain(seed, 3), target=same, proposal=same)):
                found = emission(rule, scene, self.tensor, single=True)
                distance = _distance(found.distribution, model_distribution(scene))
                assert distance < 1e-5, f"total variation {distance:.2e} with distributions in float32"

    # ------------------------------------------------------------------------------------------------ trees

    @pytest.mark.parametrize("parents", _TREES, ids=str)
    def test_siblings_drawn_without_replacement_leave_the_distribution_of_the_model(
        self, parents: tuple[int, ...]
    ) -> None:
        """Two and three drafts after one token."""
        for seed in range(2):
            self._assert_distribution(_tree(parents, seed))

    @pytest.mark.parametrize("parents", _TREES, ids=str)
    def test_certain_siblings_leave_the_distribution_of_the_model(self, parents: tuple[int, ...]) -> None:
        """The drafter's most likely tokens."""
        self._assert_distribution(attrs.evolve(_tree(parents, 5), certain=frozenset(range(len(parents)))))

    @pytest.mark.parametrize("certain", [{0}, {1}, {0, 2}, {1, 2}])
    def test_certain_siblings_beside_drawn_ones_leave_the_distribution_of_the_model(self, certain: set[int]) -> None:
        """A certain draft takes nothing from the distribution by which its siblings are drawn: they may be the same token."""
        for parents in ((0, 0, 0), (0, 0, 1)):
            self._assert_distribution(attrs.evolve(_tree(parents, 6), certain=frozenset(certain)))

    def test_greedy_and_truncated_trees_leave_the_distribution_of_the_model(self) -> None:
        """The model's distribution has one token, or one token less."""
        for parents in _TREES[:4]:
            for target in (greedy(distributions(31, 3)), distributions(31, 3, num_impossible=1)):
                self._assert_distribution(attrs.evolve(_tree(parents, 7), target=target))

    def test_equal_siblings_are_no_more_than_one(self) -> None:
        """The same certain token twice after one node: its second draft has no share."""
        scene = attrs.evolve(_tree((0, 0), 8), certain=frozenset({0, 1}), twins=True)
        self._assert_distribution(scene)
        self._assert_in_range(scene)

    def test_a_chain_is_judged_alike_whether_or_not_it_is_called_one(self) -> None:
        """``is_linear`` may be used to go a shorter way, and says nothing new."""
        rule = self._for_trees(self.make())
        scene = _chain(3, 3)
        one, other = (emission(rule, scene, self.tensor, is_linear=told) for told in (True, False))
        assert _distance(one.distribution, other.distribution) < 1e-12, (
            "a chain and a tree without branches have two distributions"
        )

    # -------------------------------------------------------------------------------------------- the call

    @pytest.mark.parametrize("kind", ["drawn", "certain", "equal", "greedy", "apart", "tree"])
    def test_shares_and_weights_are_in_range(self, kind: str) -> None:
        """Shares within 0 .. 1, of siblings at most 1 in all; weights at least 0 and not all 0, wherever verification may stop."""
        scene = _chain(2, 3)
        if kind == "certain":
            scene = attrs.evolve(scene, certain=frozenset(range(3)))
        elif kind == "equal":
            scene = attrs.evolve(scene, proposal=scene.target)
        elif kind == "greedy":
            scene = attrs.evolve(scene, target=greedy(scene.target), proposal=greedy(scene.proposal))
        elif kind == "apart":
            scene = attrs.evolve(
                scene, target=lambda _: np.array([0, 0.5, 0.5]), proposal=lambda _: np.array([1.0, 0, 0])
            )
        elif kind == "tree":
            self._for_trees(self.make())
            scene = _tree((0, 0, 0), 2)
        self._assert_in_range(scene)

    @pytest.mark.parametrize("shape", ["chain", "tree"])
    def test_padding_is_never_accepted_and_changes_nothing(self, shape: str) -> None:
        """More columns than drafts, as beside a sequence with more of them."""
        rule = self.make()
        scene = _chain(4, 2)
        if shape == "tree":
            self._for_trees(rule)
            scene = _tree((0, 0, 1), 4)
        cases = scene.cases(with_samples=not rule.needs_distributions)
        plain, padded = (verification_of(scene, cases, self.tensor, num_padding=columns) for columns in (0, 2))
        expected, found = _floats(rule.accept(plain)), _floats(rule.accept(padded))
        assert not found[:, scene.num_drafts :].any(), "padding is accepted"
        assert np.allclose(found[:, : scene.num_drafts], expected, atol=1e-12), "padding changes the shares of drafts"
        for node in range(scene.num_drafts + 1) if rule.needs_distributions else ():
            stops = self.tensor(np.full(len(cases.weights), node, np.int64))
            one, other = _floats(rule.last(plain, stops)), _floats(rule.last(padded, stops))
            assert np.allclose(_normalised(one), _normalised(other), atol=1e-12), (
                f"padding changes the distribution at node {node}"
            )

    def test_a_sequence_without_drafts_beside_others_gets_the_distribution_of_the_model(self) -> None:
        """Nothing is accepted, and the distribution is that of its newest token, whole."""
        rule = self.make()
        scene = _chain(5, 2)
        cases = scene.cases(with_samples=not rule.needs_distributions)
        asked = verification_of(scene, cases, self.tensor)
        counts = np.arange(len(cases.weights)) % 3
        tokens = np.where(np.arange(2) < counts[:, None], cases.tokens, -1)
        asked = attrs.evolve(asked, tokens=self.tensor(tokens), num_drafts=self.tensor(counts))
        assert not _floats(rule.accept(asked))[tokens < 0].any(), "padding is accepted"
        if rule.needs_distributions:
            ends = _normalised(_floats(rule.last(asked, self.tensor(counts))))
            target = _floats(asked.target)[np.arange(len(counts)), counts]
            assert np.allclose(ends, target, atol=1e-12), "after the last draft the distribution is not the model's"

    def test_a_sequence_is_judged_by_itself(self) -> None:
        """The same alone as in any company, in any order."""
        rule = self.make()
        scene = _chain(6, 2)
        cases = scene.cases(with_samples=not rule.needs_distributions)
        expected = _floats(rule.accept(verification_of(scene, cases, self.tensor)))
        order = np.random.default_rng(0).permutation(len(cases.weights))
        for chosen in (order, order[:1], order[3:5]):
            some = attrs.evolve(cases, tokens=cases.tokens[chosen], sampled=cases.sampled[chosen])
            found = _floats(rule.accept(verification_of(scene, some, self.tensor)))
            assert np.allclose(found, expected[chosen], atol=1e-12), "shares depend on other sequences of the batch"

    def test_it_is_pure(self) -> None:
        """Nothing that it is shown changes, and the same question has the same answer."""
        rule = self.make()
        shapes = [_chain(7, 2), *([_tree((0, 0, 1), 7)] if rule.supports_trees else [])]
        for scene in shapes:
            cases = scene.cases(with_samples=not rule.needs_distributions)
            asked = verification_of(scene, cases, self.tensor)
            before = [value.copy() for value in _tensors(asked)]
            answers = [self._answers(rule, asked, len(cases.weights)) for _ in range(2)]
            unchanged = [np.array_equal(one, other) for one, other in zip(before, _tensors(asked), strict=True)]
            assert all(unchanged), "a tensor of the verification was changed"
            assert all(np.array_equal(one, other) for one, other in zip(*answers, strict=True)), (
                "two answers to one question"
            )

    # --------------------------------------------------------------------------------------------- helpers

    def _lossless(self) -> AcceptanceRule:
        rule = self.make()
        if not rule.lossless:
            pytest.skip("this rule is declared lossy")
        return rule

    def _for_trees(self, rule: AcceptanceRule) -> AcceptanceRule:
        if not rule.supports_trees:
            pytest.skip("this rule takes linear drafts only")
        return rule

    def _assert_distribution(self, scene: Scene) -> None:
        rule = self._lossless()
        if not scene.is_chain:
            self._for_trees(rule)
        distance = _distance(emission(rule, scene, self.tensor).distribution, model_distribution(scene))
        most = self.tolerance * 1e-15
        assert distance < most, (
            f"the emitted distribution is {distance:.2e} away from the model's in total variation; {most:.0e} are allowed"
        )

    def _assert_in_range(self, scene: Scene) -> None:
        rule = self.make()
        cases = scene.cases(with_samples=not rule.needs_distributions)
        asked = verification_of(scene, cases, self.tensor)
        shares = self._answers(rule, asked, len(cases.weights))[0]
        for node in set(scene.parents):
            total = shares[:, [draft for draft, parent in enumerate(scene.parents) if parent == node]].sum(-1)
            assert (total <= 1 + 1e-6).all(), f"the drafts after node {node} have {total.max()} in all"

    def _answers(self, rule: AcceptanceRule, asked: Verification, count: int) -> list[np.ndarray]:
        """Return the shares, and the weights at every node."""
        nodes = range(int(asked.tokens.shape[1]) + 1) if rule.needs_distributions else ()
        stops = [self.tensor(np.full(count, node, np.int64)) for node in nodes]
        shares = legal(AcceptanceRule.accept, rule.accept(asked), asked, by=rule)
        ends = [legal(AcceptanceRule.last, rule.last(asked, stop), asked, stop, by=rule) for stop in stops]
        return [_floats(shares), *map(_floats, ends)]


def _chain(seed: int, num_drafts: int, *, target: Any = None, num_impossible: int = 0) -> Scene:
    return Scene(
        parents=tuple(range(num_drafts)),
        target=target or distributions(100 + seed, 3),
        proposal=distributions(200 + seed, 3, num_impossible=num_impossible),
    )


def _tree(parents: tuple[int, ...], seed: int) -> Scene:
    # Samples at five nodes in a vocabulary of three would be 20,000 cases.
    vocab_size = 3 if len(parents) < 4 else 2
    return Scene(
        parents=parents,
        target=distributions(300 + seed, vocab_size),
        proposal=distributions(400 + seed, vocab_size),
        vocab_size=vocab_size,
    )


def _floats(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.tolist(), np.float64)


def _tensors(asked: Verification) -> list[np.ndarray]:
    values = (asked.tokens, asked.parents, asked.num_drafts, asked.sampled, asked.target, asked.proposal)
    return [np.asarray(value.tolist()) for value in values if value is not None]


def _normalised(weights: np.ndarray) -> np.ndarray:
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation between two distributions. Pure."""
    return float(np.abs(one - other).sum()) / 2
