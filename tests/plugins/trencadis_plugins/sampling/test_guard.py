from __future__ import annotations

import math

import attrs
import pytest
import torch

from trencadis.interfaces import SamplingContext
from trencadis_plugins.sampling.guard import RowFailures, check_one_position
from trencadis_plugins.sampling.min_p import MinP

_CONTEXT = SamplingContext(rows=(4, 9), positions=(7, 31), tokens=torch.zeros((10, 40), dtype=torch.int32))


def asked(row: int) -> str:
    return {4: "allowed_token_ids and logit_bias"}[row]


def test_finite_rows_with_some_masked_tokens_pass():
    failures = RowFailures()
    logits = torch.tensor([[0.0, -math.inf], [1.0, 2.0]], dtype=torch.bfloat16)
    assert failures.check_logits(logits.clone(), _CONTEXT).equal(logits)
    failures.check_choices(logits, torch.tensor([0.0, -300.0]), _CONTEXT, asked)
    assert failures.errors(_CONTEXT) == ()


@pytest.mark.parametrize("row", [[math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_broken_logits_are_an_error_of_their_row_alone(row):
    failures = RowFailures()
    logits = failures.check_logits(torch.tensor([[0.0, 1.0], row]), _CONTEXT)
    (error,) = failures.errors(_CONTEXT)
    assert error.index == 1
    assert "row 9 at position 31 have no finite largest value" in error.message
    assert logits.tolist() == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("peak", [-math.inf, math.inf, math.nan])
def test_a_row_without_choices_is_an_error_that_names_the_parameters_at_fault(peak):
    failures = RowFailures()
    failures.check_choices(torch.zeros((2, 3)), torch.tensor([peak, 0.0]), _CONTEXT, asked)
    (error,) = failures.errors(_CONTEXT)
    assert error.index == 0
    assert "allowed_token_ids and logit_bias of this request leave row 4 at position 7 no token" in error.message


def test_an_error_of_a_part_of_a_call_is_found_in_the_whole():
    failures = RowFailures()
    part = attrs.evolve(_CONTEXT, rows=(9,), positions=(31,))
    failures.add(part, 0, "first")
    failures.add(part, 0, "second")
    assert [(error.index, error.message) for error in failures.errors(_CONTEXT)] == [(1, "first")]


def test_drafts_are_refused_to_a_processor_that_is_not_safe_with_them():
    tokens = torch.zeros((3, 9), dtype=torch.int32)
    padded = SamplingContext(rows=(0, 1, 1), positions=(4, 5, 5), tokens=tokens)
    check_one_position(padded, MinP())
    with pytest.raises(ValueError, match="MinP is not safe with speculation, and row 1 at position 6 verifies drafts"):
        check_one_position(attrs.evolve(padded, positions=(4, 5, 6)), MinP())
