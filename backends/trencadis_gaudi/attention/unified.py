"""Unified attention: the softmax of a token in up to four parts, merged by log-sum-exp.

    shared blocks ┐
    unique blocks ├─▶ (Σ exp(s − m) · v, m, Σ exp(s − m)) each ─▶ weighed by exp(m − max m) ─▶ output
    new tokens    │
    sinks         ┘

Shapes: T tokens, L keys, U blocks, S tokens per block, H query heads, KV key-value heads, G = H / KV, D head dimension.
Source: vllm-gaudi v0.11.2, extension/unified.py; merging partial softmaxes, arXiv:1805.02867, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trencadis_gaudi.attention.flat import FLOOR, block_softmax, one_hot, peaks_of_owners, slot_bias
from trencadis_torch.attention.options import AttentionOptions

__all__ = ["QUERY_SLICE", "Part", "block_part", "causal_part", "dense_part", "merge_parts", "sink_part"]

QUERY_SLICE = 512
"""Queries whose scores are computed at once, which bounds the largest temporary."""


class Part(NamedTuple):
    """Unnormalised softmax over part of the keys of each token; float32.

    Attributes:
        values: Weighted sum Σ exp(s − peak) · v, ``[T, KV, G, Dv]``.
        peak: Largest score, ``[T, KV, G]``; ``FLOOR`` where a token sees no key.
        total: Sum of the weights, Σ exp(s − peak), ``[T, KV, G]``.
    """

    values: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor


def dense_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    seen: torch.Tensor,
    options: AttentionOptions,
) -> Part:
    """Return the part of keys shared by all tokens, with a visibility mask. Pure.

    Args:
        query: Queries, ``[T, H, D]``.
        keys: Keys, ``[L, KV, D]``.
        values: Values, ``[L, KV, Dv]``.
        seen: Visibility, bool ``[T, L]``.
        options: Attention options of the layer.
    """
    num_kv_heads = keys.shape[1]
    grouped = torch.unflatten(query, 1, (num_kv_heads, -1))
    scores = options.scores(torch.einsum("tkgd,lkd->tkgl", grouped, keys), query.shape[2])
    scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
    peak = scores.amax(-1).clamp_min(FLOOR)
    weights = torch.exp(scores - peak[..., None])
    return Part(torch.einsum("tkgl,lkd->tkgd", weights.to(values.dtype), values).float(), peak, weights.sum(-1))


def causal_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    owners: torch.Tensor,
    positions: torch.Tensor,
    window: int,
    options: AttentionOptions,
) -> Part:
    """Return the part of the pass's own tokens: each sees those of its sequence up to itself. Pure.

    Computed in slices of queries, each against the keys up to its end, since tokens of a sequence are ordered by position.

    Args:
        query: Queries, ``[T, H, D]``.
        keys: Keys, ``[T, KV, D]``.
        values: Values, ``[T, KV, Dv]``.
        owners: Index of the sequence of each token, int64 ``[T]``; -1: token that neither sees nor is seen in this part.
        positions: Position of each token, int64 ``[T]``.
        window: Tokens that a query sees, itself included; 0: all.
        options: Attention options of the layer.
    """
    parts = []
    for first in range(0, len(query), QUERY_SLICE):
        here, end = slice(first, first + QUERY_SLICE), min(first + QUERY_SLICE, len(query))
        seen = (owners[here, None] == owners[:end]) & (owners[:end] >= 0) & (positions[:end] <= positions[here, None])
        if window:
            seen = seen & (positions[:end] > positions[here, None] - window)
        parts.append(dense_part(query[here], keys[:end], values[:end], seen=seen, options=options))
    return Part(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def block_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    owners: torch.Tensor,
    usage: torch.Tensor,
    skipped: torch.Tensor,
    options: AttentionOptions,
) -> Part:
    """Return the part of blocks each of which is seen by one token. Pure.

    Args:
        query: Queries, ``[T, H, D]``.
        keys: Keys by block, ``[U, S, KV, D]``.
        values: Values by block, ``[U, S, KV, Dv]``.
        owners: Index of the token that sees each block, int64 ``[U]``; -1: none.
        usage: Filled slots of each block, int64 ``[U]``; any value without an owner.
        skipped: Slots of each block before the window, int64 ``[U]``.
        options: Attention options of the layer.
    """
    num_tokens = len(query)
    mapping = one_hot(owners, num_tokens)
    bias = slot_bias(usage, skipped, keys.shape[1])[:, None]
    soft = block_softmax(query[:, None], keys, mapping=mapping, bias=bias, options=options)
    weights, peak, total = (part.squeeze(1) for part in soft)
    places = torch.where(owners < 0, num_tokens, owners)
    peaks = peaks_of_owners(peak, places, num_tokens)
    adjusted = torch.exp(peak - peaks.index_select(0, places))
    by_block = torch.einsum("nkgs,nskd->nkgd", weights.to(values.dtype), values).float() * adjusted[..., None]
    sums = [torch.matmul(mapping.T, part.flatten(1)) for part in (by_block, total * adjusted)]
    return Part(
        sums[0].view(num_tokens, *by_block.shape[1:]), peaks[:num_tokens], sums[1].view(num_tokens, *total.shape[1:])
    )


def sink_part(sinks: torch.Tensor, like: Part) -> Part:
    """Return the part of attention sinks: one additional score per head, without a value. Pure.

    Args:
        sinks: Score of each head, ``[H]``.
        like: Any other part of the same tokens, for its shape.
    """
    peak = sinks.float().view(1, *like.peak.shape[1:]).expand_as(like.peak)
    return Part(torch.zeros_like(like.values), peak, torch.ones_like(like.total))


def merge_parts(parts: Sequence[Part]) -> torch.Tensor:
    """Return attention outputs ``[T, H, Dv]``, float32; zero for a token that sees no key. Pure.

    Args:
        parts: Parts of the same tokens over different keys, at least one.
    """
    peak = parts[0].peak
    for part in parts[1:]:
        peak = torch.maximum(peak, part.peak)
    weights = [torch.exp(part.peak - peak) for part in parts]
    total = sum((part.total * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(peak))
    values = sum(
        (part.values * weight[..., None] for part, weight in zip(parts, weights, strict=True)),
        torch.zeros_like(parts[0].values),
    )
    return (values / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).flatten(1, 2)
