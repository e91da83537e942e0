from __future__ import annotations

import inspect

import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa, fused_attention
from trencadis_gaudi.emulated.device import EmulatedDeviceError

VENDOR = (
    "(ctx, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode='None', recompute_mode=None, "
    "valid_seq_len=None, seq_padding_type='left', return_dropout_mask=False, return_attn_probs=False)"
)
"""FusedSDPA.forward of habana_frameworks.torch.hpex.kernels, bridge 1.19, as in habana_api.json."""


def tensors(queries=5, keys=5):
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def expected(query, keys, values, row, positions):
    return dense_attention(*(part[row].transpose(0, 1) for part in (query, keys, values)), positions=positions)


def test_signature_is_the_vendors():
    parameters = inspect.signature(emulated_fused_sdpa).parameters.values()
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert f"({', '.join(['ctx', *found])})" == VENDOR


def test_causal_attention_follows_the_definition_and_padding_yields_zero():
    query, keys, values = tensors()
    found = fused_attention(
        emulated_fused_sdpa, query, keys, values, mask=None, query_lens=torch.tensor([5, 3]), scale=None
    )
    for row, length in ((0, 5), (1, 3)):
        dense = expected(query, keys, values, row, list(range(5)))[:length]
        torch.testing.assert_close(found[row].transpose(0, 1)[:length].double(), dense, atol=1e-5, rtol=0)
    assert not found[1, :, 3:].any()


def test_masked_attention_follows_the_definition():
    query, keys, values = tensors(queries=2, keys=6)
    mask = (torch.arange(6) <= torch.tensor([[2], [4]])).expand(2, 1, 2, 6)
    found = fused_attention(emulated_fused_sdpa, query, keys, values, mask=mask, query_lens=None, scale=None)
    for row in (0, 1):
        dense = expected(query, keys, values, row, [2, 4])
        torch.testing.assert_close(found[row].transpose(0, 1).double(), dense, atol=1e-5, rtol=0)


def test_kernel_gets_either_a_mask_or_causality_and_never_an_empty_sequence():
    calls = []

    def kernel(*args):
        calls.append(args[3:])
        return args[0]

    query, keys, values = tensors()
    mask = torch.eye(5, dtype=torch.bool).expand(2, 1, 5, 5)
    lengths = torch.tensor([0, 4])
    for given_mask in (None, mask):
        fused_attention(kernel, query, keys, values, mask=given_mask, query_lens=lengths, scale=0.5)
    assert calls[0][:6] == (None, 0.0, True, 0.5, "fast", True)
    assert calls[0][6].tolist() == [1, 4]
    assert calls[0][7] == "right"
    assert calls[1][1:] == (0.0, False, 0.5, "fast", True, None, "right")
    assert torch.equal(calls[1][0].exp().bool(), mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True, "attn_mask": torch.zeros(2, 1, 5, 5)}, "not both"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"softmax_mode": "slow"}, "no softmax_mode 'slow'"),
        ({"valid_seq_len": torch.tensor([5, 5]), "is_causal": True}, "right padding only"),
        ({"valid_seq_len": torch.tensor([5, 5]), "seq_padding_type": "right"}, "with is_causal"),
    ],
)
def test_emulated_kernel_refuses_what_the_kernel_cannot_do(options, message):
    with pytest.raises(EmulatedDeviceError, match=message):
        emulated_fused_sdpa(*tensors(), **options)
