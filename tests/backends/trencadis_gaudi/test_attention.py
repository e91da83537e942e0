"""What the properties of ``passes`` do not reach: extreme scores, half precision, slices, and what the vendor's kernel is given."""

from __future__ import annotations

import pytest
import torch

from trencadis_gaudi.attention import unified
from trencadis_gaudi.attention.flat import flat_attention, slot_bias
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa, fused_attention
from trencadis_gaudi.attention.prefill import attend_prefill
from trencadis_gaudi.attention.unified import causal_part, dense_part
from trencadis_gaudi.emulated.device import EmulatedDeviceError
from trencadis_torch.attention.options import AttentionOptions


def drawn(*shapes):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(("groups", "expected"), [((0, 0, 1), [2.207851, 4.148047]), ((-1, -1, 1), [0.0, 4.148047])])
def test_outputs_of_the_worked_example(groups, expected):
    """Two sequences, blocks of two tokens, scale 0.5; the numbers are those of the dense softmax. Padding belongs to neither."""
    usage = torch.tensor([2, 1, 2])[:, None]
    found = flat_attention(
        torch.tensor([1.0, 2.0]).view(2, 1, 1, 1),
        torch.tensor([[0.5, -1.0], [1.5, 9.0], [2.0, 0.25]]).view(3, 2, 1, 1),
        torch.tensor([[1.0, 2.0], [3.0, 99.0], [4.0, 5.0]]).view(3, 2, 1, 1),
        groups=torch.tensor(groups),
        bias=slot_bias(usage, torch.zeros_like(usage), 2),
        options=AttentionOptions(scale=0.5),
    )
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("scores", "groups", "weights"),
    [
        ([[500.0, -500.0], [-400.0, 450.0]], [0, 0], [1.0, 0.0, 0.0, 0.0]),
        ([[-500.0, -501.0], [0.0, 0.0]], [0, -1], [0.7310586, 0.2689414, 0.0, 0.0]),
    ],
    ids=["far apart", "below those of padding"],
)
def test_extreme_scores_neither_overflow_nor_vanish(scores, groups, weights):
    keys = torch.tensor(scores).view(2, 2, 1, 1)
    found = flat_attention(
        torch.ones(1, 1, 1, 1),
        keys,
        keys,
        groups=torch.tensor(groups),
        bias=torch.zeros(2, 1, 2),
        options=AttentionOptions(scale=1.0),
    )
    torch.testing.assert_close(found.flatten()[0], keys.flatten() @ torch.tensor(weights))


def test_half_precision_stays_near_single_precision():
    tensors = drawn((2, 1, 4, 8), (5, 4, 2, 8), (5, 4, 2, 8))
    groups, options = torch.tensor([0, 1, 1, -1, 0]), AttentionOptions(scale=0.3)
    exact, half = (
        flat_attention(*(part.to(dtype) for part in tensors), groups=groups, bias=torch.zeros(5, 1, 4), options=options)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.03, rtol=0)


def test_kernel_gets_either_a_mask_or_causality_and_never_an_empty_sequence():
    calls = []

    def kernel(*args):
        calls.append(args[3:])
        return args[0]

    tensors = drawn((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    mask = torch.eye(5, dtype=torch.bool).expand(2, 1, 5, 5)
    for given in (None, mask):
        fused_attention(kernel, *tensors, mask=given, query_lens=torch.tensor([0, 4]), scale=0.5)
    assert calls[0][:6] == (None, 0.0, True, 0.5, "fast", True)
    assert (calls[0][6].tolist(), calls[0][7]) == ([1, 4], "right")
    assert calls[1][1:] == (0.0, False, 0.5, "fast", True, None, "right")
    assert torch.equal(calls[1][0].exp().bool(), mask)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "attn_mask": torch.zeros(2, 1, 5, 5)},
        {"dropout_p": 0.1},
        {"softmax_mode": "slow"},
        {"valid_seq_len": torch.tensor([5, 5]), "is_causal": True},
        {"valid_seq_len": torch.tensor([5, 5]), "seq_padding_type": "right"},
    ],
    ids=["mask and causality", "dropout", "softmax", "left padding", "lengths without causality"],
)
@pytest.mark.representatives(5)
def test_emulated_kernel_refuses_what_the_kernel_cannot_do(options):
    with pytest.raises(EmulatedDeviceError):
        emulated_fused_sdpa(*drawn((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), **options)


def test_kernel_is_used_where_it_can_do_the_work_only():
    calls = []

    def kernel(*args):
        calls.append(args)
        return emulated_fused_sdpa(*args)

    query, keys = drawn((1, 4, 4, 8), (1, 4, 2, 8))
    common = {"mask": None, "query_lens": torch.tensor([4])}
    plain, fused = (
        attend_prefill(query, keys, keys, **common, options=AttentionOptions(), kernel=one) for one in (None, kernel)
    )
    torch.testing.assert_close(plain, fused, atol=1e-5, rtol=0)
    for options in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}):
        attend_prefill(query, keys, keys, **common, options=AttentionOptions(**options), kernel=kernel)
    attend_prefill(query, keys, keys[..., :6], **common, options=AttentionOptions(), kernel=kernel)
    assert len(calls) == 1


@pytest.mark.parametrize("window", [0, 2])
def test_slices_of_queries_do_not_change_the_causal_part(window, monkeypatch):
    query, keys, values = drawn((7, 4, 8), (7, 2, 8), (7, 2, 8))
    owners, positions = torch.tensor([0, 1, 1, 1, -1, 2, 2]), torch.tensor([5, 0, 1, 2, 0, 3, 4])
    seen = (owners[:, None] == owners) & (owners >= 0) & (positions <= positions[:, None])
    if window:
        seen &= positions > positions[:, None] - window
    options = AttentionOptions(scale=0.3)
    expected = dense_part(query, keys, values, seen=seen, options=options)
    for size in (unified.QUERY_SLICE, 3):
        monkeypatch.setattr(unified, "QUERY_SLICE", size)
        found = causal_part(query, keys, values, owners=owners, positions=positions, window=window, options=options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
