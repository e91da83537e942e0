from __future__ import annotations

import attrs
import pytest
import torch

from trencadis.interfaces import Verification
from trencadis_plugins.acceptance.match import Match
from trencadis_testing.acceptance import AcceptanceConformance


class TestMatch(AcceptanceConformance):
    make = Match
    tensor = staticmethod(torch.from_numpy)


def asked(sampled, tokens, parents=(0, 1, 2), *, is_linear=True, num_drafts=3):
    return Verification(
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([list(parents)]),
        num_drafts=torch.tensor([num_drafts]),
        is_linear=is_linear,
        sampled=torch.tensor([sampled]),
    )


def test_a_draft_is_compared_with_the_sample_at_the_node_before_it():
    assert Match().accept(asked([7, 8, 9, 5], [7, 6, 9])).tolist() == [[1, 0, 1]]


def test_siblings_are_compared_with_the_same_sample():
    branches = asked([7, 8, 9, 5], [6, 7, 9], (0, 0, 2), is_linear=False)
    assert Match().accept(branches).tolist() == [[0, 1, 1]]


def test_of_equal_siblings_the_first_stands():
    twins = asked([7, 8, 9, 5], [7, 7, 7], (0, 0, 1), is_linear=False)
    assert Match().accept(twins).tolist() == [[1, 0, 0]]


def test_padding_does_not_stand_whatever_was_sampled():
    assert Match().accept(asked([7, -1, -1, -1], [7, -1, -1], num_drafts=1)).tolist() == [[1, 0, 0]]


def test_distributions_instead_of_samples_are_refused_in_words():
    with pytest.raises(ValueError, match="needs no distributions"):
        Match().accept(attrs.evolve(asked([7, 8, 9, 5], [7, 6, 9]), sampled=None))
