"""Attention of a batch of queries over gathered keys and values: stock PyTorch operations, any device.

Shapes: B sequences, Q queries and L keys each, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis_torch.attention.options import AttentionOptions

__all__ = ["attend", "explicit_attention"]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention outputs ``[B, H, Q, Dv]``. Pure.

    Args:
        query: ``[B, H, Q, D]``.
        keys: ``[B, KV, L, D]``.
        values: ``[B, KV, L, Dv]``.
        mask: bool ``[B or 1, 1, Q, L]``, True where a query sees a key; None with Q = 1 lets it see every key, with
            Q = L > 1 those not after it.
        options: Options of the layer.
    """
    causal = mask is None and query.shape[2] > 1
    if not options.is_plain:
        if causal:
            size = query.shape[2]
            mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril_()[None, None]
        return explicit_attention(query, keys, values, mask=mask, options=options)
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    if num_heads == num_kv_heads or query.device.type == "cpu" or causal:
        # The CPU's fused kernel takes grouped heads with and without a mask; on CUDA only the one without a mask does.
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=options.scale,
            enable_gqa=num_heads != num_kv_heads,
        )
    groups = num_heads // num_kv_heads
    packed = torch.unflatten(query, 1, (num_kv_heads, groups)).flatten(2, 3)
    if mask is not None:
        mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=options.scale)
    return torch.unflatten(output, 2, (groups, query.shape[2])).flatten(1, 2)


def explicit_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention outputs ``[B, H, Q, Dv]`` step by step, softmax in float32. Pure; arguments as in :func:`attend`.

    Source: a sink is one more column of the softmax, arXiv:2309.17453, section 3.1.
    """
    num_kv_heads = keys.shape[1]
    groups = query.shape[1] // num_kv_heads
    grouped = torch.unflatten(query, 1, (num_kv_heads, groups))
    scores = options.scores(torch.matmul(grouped, keys.unsqueeze(2).transpose(-1, -2)), query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    if options.sinks is not None:
        column = options.sinks.float().view(1, num_kv_heads, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(values.dtype), values.unsqueeze(2)).flatten(1, 2)
