from __future__ import annotations

import pytest
import torch

from trencadis_plugins.acceptance.token import Token
from trencadis_testing.acceptance import AcceptanceConformance


class TestToken(AcceptanceConformance):
    make = Token
    tensor = staticmethod(torch.from_numpy)


def stop(node: int) -> torch.Tensor:
    return torch.tensor([node])


@pytest.mark.parametrize(("token", "stands"), [(0, 1.0), (1, 1.0), (2, 0.375), (3, 0.5)])
def test_a_drawn_draft_stands_with_the_ratio_of_the_distributions(asked, token, stands):
    assert Token().accept(asked([token])).tolist() == [[pytest.approx(stands)]]


def test_what_is_left_of_the_example_is_five_to_one(asked):
    assert Token().last(asked([2]), stop(0))[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0, 0])
    assert Token().last(asked([2]), stop(1))[0].tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])


def test_a_certain_draft_stands_with_its_probability_and_is_left_out_if_it_does_not(asked):
    certain = asked([1], proposal=None)
    assert Token().accept(certain).tolist() == [[0.3]]
    assert Token().last(certain, stop(0))[0].tolist() == pytest.approx([0.5 / 0.7, 0, 0.15 / 0.7, 0.05 / 0.7])


def test_a_draft_that_its_distribution_rules_out_never_stands(asked):
    assert Token().accept(asked([0], proposal=[(0.0, 0.5, 0.5, 0.0)])).tolist() == [[0.0]]
