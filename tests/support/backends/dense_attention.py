"""Attention from its definition: one query, one head at a time, in float64."""

from __future__ import annotations

import math

import torch


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: list[int],
    scale: float | None = None,
    window: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return outputs ``[Q, H, Dv]`` of queries ``[Q, H, D]`` at ``positions`` over keys ``[L, KV, D]`` of positions 0 .. L - 1."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, keys, values = query.double(), keys.double(), values.double()
    output = torch.zeros(len(query), num_heads, values.shape[-1], dtype=torch.float64)
    for q, position in enumerate(positions):
        first = max(0, position - window + 1) if window else 0
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = [float(query[q, head] @ keys[k, kv_head]) * scale for k in range(first, position + 1)]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for k, weight in zip(range(first, position + 1), weights, strict=True):
                output[q, head] += weight / total * values[k, kv_head]
    return output
