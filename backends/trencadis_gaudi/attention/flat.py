"""Flat paged attention: a softmax over each block, then a weighted sum over the blocks of a sequence; all shapes are static.

    query ─ one-hot ─▶ a copy for each block ─▶ softmax within the block ─▶ weigh by the sequence's maximum ─ one-hot ─▶ output

Shapes: B sequences, Q queries of each, N blocks, S tokens per block, H query heads, KV key-value heads, G = H / KV, D head dimension.
Source: vllm-gaudi, extension/ops.py, flat_pa; online softmax over parts, arXiv:1805.02867, section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trencadis_torch.attention.options import AttentionOptions

__all__ = ["FLOOR", "BlockSoftmax", "block_softmax", "flat_attention", "one_hot", "peaks_of_owners", "slot_bias"]

FLOOR = -1e30
"""Maximum of an empty set of scores; finite, so that differences are not NaN."""


class BlockSoftmax(NamedTuple):
    """Unnormalised softmax within each block.

    Attributes:
        weights: exp(score − peak), float32 ``[N, Q, KV, G, S]``.
        peak: Largest score, float32 ``[N, Q, KV, G]``; ``FLOOR`` where a query sees no slot.
        total: Sum of the weights, float32 ``[N, Q, KV, G]``.
    """

    weights: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor


def flat_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    groups: torch.Tensor,
    bias: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention outputs ``[B, Q, H, Dv]``; zero for a sequence without blocks. Pure.

    Args:
        query: Queries, ``[B, Q, H, D]``.
        keys: Keys by block, ``[N, S, KV, D]``.
        values: Values by block, ``[N, S, KV, Dv]``.
        groups: Index of the sequence that owns each block, int64 ``[N]``; -1 in padding.
        bias: Additive mask, float32 ``[N, Q, S]``: 0 where a query sees a slot, else minus infinity.
        options: Attention options of the layer.
    """
    batch_size, query_len, num_heads, _ = query.shape
    mapping = one_hot(groups, batch_size)
    soft = block_softmax(query, keys, mapping=mapping, bias=bias, options=options)
    owners = torch.where(groups < 0, batch_size, groups)
    peaks = peaks_of_owners(soft.peak, owners, batch_size)
    if options.sinks is not None:
        heads = options.sinks.float().view(1, 1, *soft.peak.shape[2:])
        peaks = torch.maximum(peaks, heads)
    adjusted = torch.exp(soft.peak - peaks.index_select(0, owners))
    share = soft.total * adjusted
    total = torch.matmul(mapping.T, share.flatten(1)).view(batch_size, *share.shape[1:])
    if options.sinks is not None:
        total = total + torch.exp(heads - peaks[:batch_size])
    by_block = torch.matmul(mapping, total.flatten(1)).view(share.shape)
    # Padding belongs to no sequence; its own sum keeps the division finite. No query of a sequence is without visible slots,
    # since it sees itself.
    ratio = adjusted / torch.maximum(by_block, share).clamp_min(torch.finfo(torch.float32).tiny)
    weights = (soft.weights * ratio[..., None]).to(values.dtype)
    parts = torch.einsum("nqkgs,nskd->nqkgd", weights, values)
    output = torch.matmul(mapping.to(values.dtype).T, parts.flatten(1))
    return output.view(batch_size, query_len, num_heads, values.shape[-1])


def one_hot(groups: torch.Tensor, num_owners: int) -> torch.Tensor:
    """Return float32 ``[N, num_owners]``, 1 where a block belongs to an owner; rows of padding (-1) are zero."""
    return (groups[:, None] == torch.arange(num_owners, device=groups.device)).float()


def block_softmax(
    query: torch.Tensor,
    keys: torch.Tensor,
    *,
    mapping: torch.Tensor,
    bias: torch.Tensor,
    options: AttentionOptions,
) -> BlockSoftmax:
    """Return the softmax of each owner's queries within its blocks. Pure; arguments as in :func:`flat_attention`.

    Args:
        query: Queries, ``[B, Q, H, D]``.
        keys: Keys by block, ``[N, S, KV, D]``.
        mapping: Result of :func:`one_hot`, ``[N, B]``.
        bias: Additive mask, ``[N, Q, S]``.
        options: Attention options of the layer.
    """
    num_kv_heads, num_groups = keys.shape[2], query.shape[2] // keys.shape[2]
    copies = torch.matmul(mapping.to(query.dtype), query.flatten(1))
    copies = copies.view(-1, query.shape[1], num_kv_heads, num_groups, query.shape[3])
    scores = options.scores(torch.einsum("nqkgd,nskd->nqkgs", copies, keys), query.shape[3])
    scores = scores + bias[:, :, None, None, :]
    peak = scores.amax(-1).clamp_min(FLOOR)
    weights = torch.exp(scores - peak[..., None])
    return BlockSoftmax(weights, peak, weights.sum(-1))


def peaks_of_owners(peaks: torch.Tensor, owners: torch.Tensor, num_owners: int) -> torch.Tensor:
    """Return the largest peak of each owner's blocks, ``[num_owners + 1, …]``; the last entry is for padding. Pure.

    Args:
        peaks: Peak of each block, ``[N, …]``.
        owners: Owner of each block, int64 ``[N]``; ``num_owners`` in padding.
        num_owners: Number of owners.
    """
    index = owners.view(-1, *[1] * (peaks.dim() - 1)).expand_as(peaks)
    floor = peaks.new_full((num_owners + 1, *peaks.shape[1:]), FLOOR)
    return floor.scatter_reduce(0, index, peaks, "amax")


def slot_bias(usage: torch.Tensor, skipped: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return 0 for slots from ``skipped`` up to ``usage``, else minus infinity: float32 ``[…, S]``. Pure.

    Args:
        usage: End of the visible slots, ``[…]``, 0 to S.
        skipped: Start of the visible slots, ``[…]``, 0 to S.
        block_size: Tokens per block, S.
    """
    offsets = torch.arange(block_size, device=usage.device)
    hidden = (offsets >= usage[..., None]) | (offsets < skipped[..., None])
    return torch.zeros(hidden.shape, device=usage.device).masked_fill(hidden, float("-inf"))
