from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.acceptance.tree import Tree
from trencadis_testing.acceptance import AcceptanceConformance
from trencadis_testing.acceptance_scenes import Scene, emission


class TestTree(AcceptanceConformance):
    make = Tree
    tensor = staticmethod(torch.from_numpy)


P, Q = (0.5, 0.3, 0.15, 0.05), (0.25, 0.25, 0.4, 0.1)


@pytest.mark.parametrize(("num_siblings", "chance"), [(1, 0.7000), (2, 0.8681), (3, 0.9468)])
def test_siblings_drawn_without_replacement_stand_as_often_as_published(num_siblings, chance):
    scene = Scene(
        parents=(0,) * num_siblings, target=lambda _: np.array(P), proposal=lambda _: np.array(Q), vocab_size=4
    )
    found = emission(Tree(), scene, torch.from_numpy)
    assert found.mean_accepted == pytest.approx(chance, abs=5e-5)
    assert np.abs(found.distribution.reshape(4, 4).sum(1) - P).max() < 1e-15


def test_certain_siblings_stand_with_their_probabilities(asked):
    two = asked([2, 0], proposal=None, parents=[0, 0])
    assert Tree().accept(two).tolist() == [[pytest.approx(0.15), pytest.approx(0.5)]]
    assert Tree().last(two, torch.tensor([0]))[0].tolist() == pytest.approx([0, 0.3 / 0.35, 0, 0.05 / 0.35])


def test_drafts_behind_other_nodes_take_nothing_from_a_node(asked):
    three = asked([2, 1, 0], parents=[0, 1, 1])
    assert Tree().accept(three)[0, 0] == pytest.approx(0.375)
    assert Tree().last(three, torch.tensor([0]))[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0, 0])
    assert Tree().last(three, torch.tensor([3]))[0].tolist() == pytest.approx(P)
