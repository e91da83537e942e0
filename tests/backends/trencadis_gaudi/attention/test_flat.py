from __future__ import annotations

import pytest
import torch

from trencadis_gaudi.attention.flat import FLOOR, flat_attention, one_hot, peaks_of_owners, slot_bias
from trencadis_torch.attention.options import AttentionOptions


def worked(groups=(0, 0, 1), usage=(2, 1, 2), **options):
    keys = torch.tensor([[0.5, -1.0], [1.5, 9.0], [2.0, 0.25]]).view(3, 2, 1, 1)
    values = torch.tensor([[1.0, 2.0], [3.0, 99.0], [4.0, 5.0]]).view(3, 2, 1, 1)
    usage = torch.tensor(usage)[:, None]
    return flat_attention(
        torch.tensor([1.0, 2.0]).view(2, 1, 1, 1),
        keys,
        values,
        groups=torch.tensor(groups),
        bias=slot_bias(usage, torch.zeros_like(usage), 2),
        options=AttentionOptions(scale=0.5, **options),
    ).flatten()


def test_outputs_of_the_worked_example():
    """Two sequences, blocks of two tokens, scale 0.5; the numbers are those of the dense softmax."""
    torch.testing.assert_close(worked(), torch.tensor([2.207851, 4.148047]), atol=1e-6, rtol=0)


def test_padding_belongs_to_no_sequence_and_a_sequence_without_blocks_yields_zero():
    found = worked(groups=(-1, -1, 1))
    torch.testing.assert_close(found, torch.tensor([0.0, 4.148047]), atol=1e-6, rtol=0)


def test_block_that_is_wholly_hidden_weighs_nothing():
    found = worked(groups=(0, 0, 1), usage=(2, 0, 2))
    weights = torch.tensor([0.25, -0.5]).softmax(0)
    assert found[0].item() == pytest.approx(float(weights @ torch.tensor([1.0, 2.0])), abs=1e-6)


def test_sink_takes_its_share_of_the_softmax():
    found = worked(sinks=torch.tensor([3.0]))
    scores = torch.tensor([0.25, -0.5, 0.75, 3.0]).softmax(0)
    assert found[0].item() == pytest.approx(float(scores[:3] @ torch.tensor([1.0, 2.0, 3.0])), abs=1e-6)


def test_scores_far_apart_do_not_overflow():
    keys = torch.tensor([[500.0, -500.0], [-400.0, 450.0]]).view(2, 2, 1, 1)
    bias = torch.zeros(2, 1, 2)
    found = flat_attention(
        torch.ones(1, 1, 1, 1), keys, keys, groups=torch.tensor([0, 0]), bias=bias, options=AttentionOptions(scale=1.0)
    )
    torch.testing.assert_close(found.flatten(), torch.tensor([500.0]))


def test_padding_does_not_raise_the_maximum_of_a_sequence():
    """Against the score 0 of a padding block the weights exp(-500) would all vanish."""
    keys = torch.tensor([[-500.0, -501.0], [0.0, 0.0]]).view(2, 2, 1, 1)
    found = flat_attention(
        torch.ones(1, 1, 1, 1),
        keys,
        keys,
        groups=torch.tensor([0, -1]),
        bias=torch.zeros(2, 1, 2),
        options=AttentionOptions(scale=1.0),
    )
    expected = torch.tensor([-500.0, -501.0]) @ torch.tensor([0.0, -1.0]).softmax(0)
    torch.testing.assert_close(found.flatten()[0], expected)


def test_half_precision_stays_near_single_precision():
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(s, generator=generator) for s in ((2, 1, 4, 8), (5, 4, 2, 8), (5, 4, 2, 8)))
    options = {
        "groups": torch.tensor([0, 1, 1, -1, 0]),
        "bias": torch.zeros(5, 1, 4),
        "options": AttentionOptions(scale=0.3),
    }
    exact = flat_attention(query, keys, values, **options)
    half = flat_attention(query.bfloat16(), keys.bfloat16(), values.bfloat16(), **options)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.03, rtol=0)


def test_one_hot_row_of_padding_is_zero():
    assert one_hot(torch.tensor([1, -1, 0]), 2).tolist() == [[0, 1], [0, 0], [1, 0]]


def test_peak_of_an_owner_is_the_largest_of_its_blocks():
    peaks = peaks_of_owners(torch.tensor([[1.0], [5.0], [3.0], [9.0]]), torch.tensor([0, 0, 1, 3]), 3)
    assert peaks.flatten().tolist() == [5.0, 3.0, torch.tensor(FLOOR).item(), 9.0]


def test_bias_opens_the_slots_between_skipped_and_usage():
    bias = slot_bias(torch.tensor([3, 1]), torch.tensor([1, 0]), 4)
    assert bias.exp().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
