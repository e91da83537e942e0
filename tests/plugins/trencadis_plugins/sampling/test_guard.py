from __future__ import annotations

import math

import attrs
import pytest
import torch

from trencadis.interfaces import SamplingContext
from trencadis_plugins.sampling.guard import check_choices, check_logits, check_one_position
from trencadis_plugins.sampling.min_p import MinP

_CONTEXT = SamplingContext(rows=(4, 9), positions=(7, 31), tokens=torch.zeros((10, 40), dtype=torch.int32))


def test_finite_rows_with_some_masked_tokens_pass():
    check_logits(torch.tensor([[0.0, -math.inf], [1.0, 2.0]], dtype=torch.bfloat16), _CONTEXT)
    check_choices(torch.tensor([0.0, -300.0]), _CONTEXT)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_broken_logits_are_refused_with_row_and_position(row):
    with pytest.raises(ValueError, match="row 9 at position 31 have no finite largest value"):
        check_logits(torch.tensor([[0.0, 1.0], row]), _CONTEXT)


@pytest.mark.parametrize("peak", [-math.inf, math.inf, math.nan])
def test_a_row_without_choices_is_refused_with_the_parameters_at_fault(peak):
    with pytest.raises(ValueError, match="logit_bias together leave row 4 at position 7 no token"):
        check_choices(torch.tensor([peak, 0.0]), _CONTEXT)


def test_drafts_are_refused_to_a_processor_that_is_not_safe_with_them():
    tokens = torch.zeros((3, 9), dtype=torch.int32)
    padded = SamplingContext(rows=(0, 1, 1), positions=(4, 5, 5), tokens=tokens)
    check_one_position(padded, MinP())
    with pytest.raises(ValueError, match="MinP is not safe with speculation, and row 1 at position 6 verifies drafts"):
        check_one_position(attrs.evolve(padded, positions=(4, 5, 6)), MinP())
