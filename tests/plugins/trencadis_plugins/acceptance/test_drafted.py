from __future__ import annotations

import attrs
import pytest
import torch

from trencadis.interfaces import Verification
from trencadis_plugins.acceptance.drafted import (
    are_drawn,
    are_real,
    chances,
    distribution_of,
    earlier_siblings,
    leftover,
    ratios,
    target_at,
    target_chances,
    target_of,
)

Q = [0.25, 0.25, 0.4, 0.1]
TREE = Verification(
    tokens=torch.tensor([[2, 0, 2, 3], [1, -1, -1, -1]]),
    parents=torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]]),
    num_drafts=torch.tensor([4, 1]),
    is_linear=False,
    target=torch.tensor([[[0.5, 0.3, 0.15, 0.05]] * 5, [[0.1, 0.2, 0.3, 0.4]] * 5], dtype=torch.float64),
    # The third draft of the first sequence is certain, and so is the only one of the second.
    proposal=torch.tensor([[Q, Q, [0.0] * 4, Q], [[0.0] * 4] * 4], dtype=torch.float64),
)


def rows(*numbers):
    return torch.tensor(numbers)


def test_drafts_are_told_from_padding():
    assert are_real(TREE).tolist() == [[True] * 4, [True, False, False, False]]


def test_siblings_come_before_and_stand_behind_the_same_node():
    pairs = earlier_siblings(TREE).nonzero().tolist()
    assert pairs == [[0, 1, 0], [0, 2, 0], [0, 2, 1]]


def test_the_models_chances_are_those_behind_the_node_before_each_draft():
    assert target_chances(TREE)[0].tolist() == [0.15, 0.5, 0.15, 0.05]
    assert target_chances(TREE)[1, 0] == 0.2


def test_drafts_without_a_distribution_were_certain():
    assert are_drawn(TREE).tolist() == [[True, True, False, True], [False] * 4]
    assert chances(TREE)[0].tolist() == [0.4, 0.25, 1.0, 0.1]
    assert chances(TREE)[1, 0] == 1.0


def test_without_a_table_all_drafts_are_certain():
    bare = attrs.evolve(TREE, proposal=None)
    assert not are_drawn(bare).any()
    assert (chances(bare) == 1).all()
    assert distribution_of(bare, rows(3, 0)).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_the_distribution_of_a_draft_is_recorded_or_certain_or_nothing():
    assert distribution_of(TREE, rows(0, 0)).tolist() == [Q, [0, 1, 0, 0]]
    assert distribution_of(TREE, rows(2, 1)).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert distribution_of(TREE, rows(4, 4)).tolist() == [[0] * 4] * 2


def test_a_draft_behind_drawn_siblings_has_the_distribution_that_they_left():
    before = torch.zeros(2, 4, dtype=torch.bool)
    before[0, 0] = True
    found = distribution_of(TREE, rows(1, 0), before)
    assert found[0].tolist() == pytest.approx([0.25 / 0.6, 0.25 / 0.6, 0, 0.1 / 0.6])
    assert found[1].tolist() == [0, 1, 0, 0]


def test_a_chance_of_zero_refuses_and_is_not_divided_by():
    found = ratios(torch.tensor([0.5, 0.0, 0.2, 0.0]), torch.tensor([0.25, 0.5, 0.0, 0.0]))
    assert found.tolist() == [1, 0, 0, 0]


def test_what_is_left_is_a_distribution_and_the_target_where_there_is_nothing():
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3, dtype=torch.float64)
    drawn = torch.tensor([Q, [0.5, 0.3, 0.15, 0.05], [0.0] * 4], dtype=torch.float64)
    found = leftover(target, drawn)
    assert found[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0, 0])
    assert torch.allclose(found[1:], target[1:])
    weighed = leftover(target[:1], drawn[:1], torch.tensor([[0.6]]))
    assert weighed[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_the_target_is_read_at_one_node_of_each_sequence():
    assert target_at(TREE, rows(4, 0)).tolist() == [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]


def test_a_rule_that_was_shown_no_distributions_says_what_it_must_declare():
    with pytest.raises(ValueError, match="needs_distributions"):
        target_of(attrs.evolve(TREE, target=None))
