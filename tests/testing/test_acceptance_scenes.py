from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import AcceptanceRule
from trencadis_testing.acceptance_scenes import (
    Scene,
    distributions,
    emission,
    model_distribution,
    verification_of,
)

CHAIN = Scene(parents=(0, 1), target=distributions(1, 3), proposal=distributions(2, 3))
TREE = Scene(parents=(0, 0, 1), target=distributions(1, 3), proposal=distributions(2, 3))


class Never(AcceptanceRule):
    """Accepts nothing, and draws as the model does."""

    lossless = True
    needs_distributions = True
    supports_trees = True

    def accept(self, verification):
        return torch.zeros(verification.tokens.shape, dtype=torch.float64)

    def last(self, verification, stops):
        return verification.target[torch.arange(len(stops)), stops]


class Always(Never):
    """Accepts every draft of a chain."""

    def accept(self, verification):
        return torch.ones(verification.tokens.shape, dtype=torch.float64)


def test_siblings_are_drawn_without_replacement():
    found = dict(TREE.drafted())
    assert sum(found.values()) == pytest.approx(1)
    assert not any(tokens[0] == tokens[1] for tokens in found)
    distribution = TREE.proposal(())
    assert found[2, 0, 1] == pytest.approx(
        distribution[2] * distribution[0] / (1 - distribution[2]) * TREE.proposal((2,))[1]
    )


def test_certain_siblings_are_the_most_likely_tokens_or_twins():
    scene = Scene(
        parents=(0, 0), target=distributions(1, 3), proposal=lambda _: np.array([0.2, 0.5, 0.3]), certain={0, 1}
    )
    assert list(scene.drafted()) == [((1, 2), 1.0)]
    twins = Scene(parents=(0, 0), target=distributions(1, 3), proposal=scene.proposal, certain={0, 1}, twins=True)
    assert list(twins.drafted()) == [((1, 1), 1.0)]


def test_a_rule_is_shown_distributions_or_samples_padded_behind_the_drafts():
    cases = TREE.cases(with_samples=False)
    asked = verification_of(TREE, cases, torch.from_numpy, num_padding=1, single=True)
    row = cases.tokens.tolist().index([2, 0, 1])
    assert asked.tokens[row].tolist() == [2, 0, 1, -1]
    assert asked.parents[row].tolist() == [0, 0, 1, 3]
    assert not asked.is_linear
    assert asked.sampled is None
    assert asked.target.dtype == torch.float32
    assert asked.target[row, 3].tolist() == pytest.approx(TREE.target((2, 1)), abs=1e-6)
    assert asked.proposal[row, 1].tolist() == pytest.approx(TREE.proposal(()), abs=1e-6)
    assert not asked.proposal[row, 3].any()
    samples = verification_of(CHAIN, CHAIN.cases(with_samples=True), torch.from_numpy)
    assert samples.target is None
    assert samples.sampled.shape == (243, 3)


def test_the_models_distribution_is_that_of_one_token_after_another():
    distribution = model_distribution(CHAIN).reshape(3, 3, 3)
    assert distribution.sum() == pytest.approx(1)
    assert distribution[2, 0, 1] == pytest.approx(CHAIN.target(())[2] * CHAIN.target((2,))[0] * CHAIN.target((2, 0))[1])


def test_without_acceptance_a_text_has_the_distribution_of_the_model():
    for scene in (CHAIN, TREE):
        found = emission(Never(), scene, torch.from_numpy)
        assert np.abs(found.distribution - model_distribution(scene)).max() < 1e-15
        assert found.mean_accepted == 0


def test_if_every_draft_stands_a_text_has_the_distribution_of_the_drafter():
    found = emission(Always(), CHAIN, torch.from_numpy)
    distribution = found.distribution.reshape(3, 3, 3)
    assert distribution.sum(2)[2, 1] == pytest.approx(CHAIN.proposal(())[2] * CHAIN.proposal((2,))[1])
    assert found.mean_accepted == pytest.approx(2)
