from __future__ import annotations

import math

import pytest
import torch

from trencadis_plugins.acceptance import trencadis_acceptance_rules
from trencadis_plugins.acceptance.config import TypicalConfig
from trencadis_plugins.acceptance.typical import Typical
from trencadis_testing.acceptance import AcceptanceConformance


class TestTypical(AcceptanceConformance):
    make = Typical
    tensor = staticmethod(torch.from_numpy)


P = (0.5, 0.3, 0.15, 0.05)


def test_a_draft_stands_above_the_lower_of_two_thresholds(asked):
    # H(P) = 1.142: 0.3 * exp(-H) = 0.0957 is above epsilon = 0.09.
    assert [Typical().accept(asked([token])).item() for token in range(4)] == [1, 1, 1, 0]
    flat = [(0.08,) * 12 + (0.04,)]
    entropy = -(12 * 0.08 * math.log(0.08) + 0.04 * math.log(0.04))
    assert 0.3 * math.exp(-entropy) < 0.04
    assert Typical().accept(asked([12], target=flat, proposal=None)).item() == 1
    sharper = Typical(TypicalConfig(epsilon=0.09, delta=0.6))
    assert sharper.accept(asked([12], target=flat, proposal=None)).item() == 0


def test_epsilon_is_the_most_that_is_asked_of_a_draft(asked):
    make = {component.name: component for component in trencadis_acceptance_rules()}["typical"].factory
    assert [make(TypicalConfig(epsilon=e, delta=9.0), None).accept(asked([2])).item() for e in (0.2, 0.14)] == [0, 1]


@pytest.mark.parametrize("value", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}])
def test_a_value_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=next(iter(value))):
        TypicalConfig(**value)


def test_a_greedy_row_keeps_its_token(asked):
    certain = [(0.0, 1.0, 0.0, 0.0)]
    assert [Typical().accept(asked([token], target=certain)).item() for token in range(4)] == [0, 1, 0, 0]
    assert Typical().last(asked([0], target=certain), torch.tensor([0]))[0].tolist() == [0, 1, 0, 0]


def test_of_plausible_siblings_the_most_likely_stands(asked):
    three = asked([2, 0, 1], parents=[0, 0, 0])
    assert Typical().accept(three).tolist() == [[0, 1, 0]]
    twins = asked([1, 1], parents=[0, 0])
    assert Typical().accept(twins).tolist() == [[1, 0]]
    assert Typical().accept(asked([3, 3], parents=[0, 0])).tolist() == [[0, 0]]


def test_behind_a_refused_draft_the_model_draws_as_it_would(asked):
    assert Typical().last(asked([3]), torch.tensor([0]))[0].tolist() == pytest.approx(P)
