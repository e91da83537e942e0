from __future__ import annotations

import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend, explicit_attention


def tensors(*, queries, keys, heads=4, kv_heads=2, dim=8, value_dim=8):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def run(function, query, keys, values, *, mask, **options):
    batched = [part.transpose(0, 1)[None] for part in (query, keys, values)]
    return function(*batched, mask=mask, options=AttentionOptions(**options))[0].transpose(0, 1).double()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_causal_attention_follows_the_definition(kv_heads, options):
    query, keys, values = tensors(queries=6, keys=6, kv_heads=kv_heads)
    expected = dense_attention(query, keys, values, positions=list(range(6)), scale=0.3, **options)
    torch.testing.assert_close(
        run(attend, query, keys, values, mask=None, scale=0.3, **options), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_single_query_sees_every_key(options):
    query, keys, values = tensors(queries=1, keys=9)
    expected = dense_attention(query, keys, values, positions=[8], **options)
    torch.testing.assert_close(run(attend, query, keys, values, mask=None, **options), expected, atol=1e-5, rtol=0)


def test_mask_hides_keys_and_values_may_be_narrower():
    query, keys, values = tensors(queries=2, keys=7, value_dim=5)
    mask = torch.arange(7) <= torch.tensor([[3], [5]])
    expected = dense_attention(query, keys, values, positions=[3, 5])
    for function in (attend, explicit_attention):
        found = run(function, query, keys, values, mask=mask[None, None])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
