from __future__ import annotations

import pytest
import torch

from trencadis.errors import ModelLoadError
from trencadis_torch.parallel.cuts import even, halves, padded

WHOLE = torch.arange(24.0).view(12, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_even_parts_are_the_whole_in_order(size):
    parts = [even(12, dim=0, rank=rank, size=size, what="w").take(WHOLE) for rank in range(size)]
    assert torch.equal(torch.cat(parts), WHOLE)


def test_each_rank_has_its_share_of_each_half():
    first, second = (halves(12, dim=0, rank=rank, size=2, what="w") for rank in range(2))
    assert first.take(WHOLE)[:, 0].tolist() == [0, 2, 4, 12, 14, 16]
    assert second.take(WHOLE)[:, 0].tolist() == [6, 8, 10, 18, 20, 22]
    assert first.shape(WHOLE.shape) == (6, 2)


def test_a_dimension_in_the_middle_is_cut():
    whole = torch.randn(3, 8, 5)
    cut = halves(8, dim=1, rank=1, size=2, what="w")
    assert torch.equal(cut.take(whole), whole[:, [2, 3, 6, 7]])
    assert cut.shape(whole.shape) == (3, 4, 5)


def test_sizes_that_leave_a_rest_are_refused_with_the_legal_ones():
    with pytest.raises(ModelLoadError, match=r"tensor = 5: mlp.gate has 12 .* not a multiple of 5") as found:
        even(12, dim=0, rank=0, size=5, what="mlp.gate")
    assert "1, 2, 3, 4, 6, 12" in found.value.hint


@pytest.mark.parametrize(("num", "size"), [(131, 2), (131, 4), (5, 4), (3, 4), (8, 4)])
def test_vocabularies_are_divided_without_a_gap_and_padded_at_the_end(num, size):
    cuts = [padded(num, dim=0, rank=rank, size=size) for rank in range(size)]
    assert [token for cut in cuts for one in cut.ranges for token in range(*one)] == list(range(num))
    assert len({cut.size for cut in cuts}) == 1
    assert all(last - first <= cut.size for cut in cuts for first, last in cut.ranges)
