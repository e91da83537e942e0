"""Attention of prefills over gathered context followed by new keys, with one visibility mask.

Shapes: B sequences, Q queries, C context blocks, S tokens per block, L = C × S + Q keys, H query heads, KV key-value heads.
"""

from __future__ import annotations

import torch

from trencadis_gaudi.attention.fused_sdpa import FusedSDPA, fused_attention
from trencadis_gaudi.flat_cache import FlatLayer
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend

__all__ = ["attend_prefill", "batch_mask", "causal_mask", "merged_mask", "with_context"]


def with_context(
    layer: FlatLayer, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cached and new keys and values of each sequence, each ``[B, L, KV, D]``.

    Args:
        layer: Layer of the cache.
        blocks: Context block ids, int64 ``[B, C]``.
        keys: New keys, ``[B, Q, KV, D]``.
        values: New values, ``[B, Q, KV, Dv]``.
    """
    if not blocks.numel():
        return keys, values
    contexts = (part.view(len(blocks), -1, *part.shape[2:]) for part in layer.gather(blocks.flatten()))
    keys, values = (torch.cat(both, dim=1) for both in zip(contexts, (keys, values), strict=True))
    return keys, values


def causal_mask(queries: torch.Tensor, keys: torch.Tensor, real: torch.Tensor, window: int) -> torch.Tensor:
    """Return bool ``[B, 1, Q, L]``, True where a query sees a key. Pure.

    A query sees itself even if it is padding, so that no softmax is empty.

    Args:
        queries: Positions of the queries, ``[B, Q]``; the last Q keys belong to the queries.
        keys: Positions of the keys, ``[B, L]``.
        real: Whether a key may be seen at all, bool ``[B, L]`` or ``[B, Q, L]``.
        window: Tokens that a query sees, itself included; 0: all.
    """
    query_len, num_context = queries.shape[1], keys.shape[1] - queries.shape[1]
    if real.dim() == 2:
        real = real[:, None]
    seen = real & (keys[:, None] <= queries[:, :, None])
    if window:
        seen = seen & (keys[:, None] > queries[:, :, None] - window)
    itself = torch.eye(query_len, dtype=torch.bool, device=queries.device)
    return (seen | torch.nn.functional.pad(itself, (num_context, 0)))[:, None]


def batch_mask(
    context_lens: torch.Tensor, query_lens: torch.Tensor, *, num_context: int, query_len: int, window: int
) -> torch.Tensor:
    """Return the mask of a batch of sequences, bool ``[B, 1, Q, num_context + Q]``. Pure.

    Args:
        context_lens: Context tokens of each sequence, int64 ``[B]``, 0 to num_context.
        query_lens: Real queries of each sequence, int64 ``[B]``, 0 to Q; later queries are padding.
        num_context: Context slots of a sequence, C × S.
        query_len: Queries of a sequence, Q.
        window: Tokens that a query sees, itself included; 0: all.
    """
    context = torch.arange(num_context, device=context_lens.device)
    steps = torch.arange(query_len, device=context_lens.device)
    queries = context_lens[:, None] + steps
    keys = torch.cat([context.expand(len(context_lens), -1), queries], dim=1)
    real = torch.cat([context < context_lens[:, None], steps < query_lens[:, None]], dim=1)
    return causal_mask(queries, keys, real, window)


def merged_mask(
    groups: torch.Tensor,
    positions: torch.Tensor,
    context_groups: torch.Tensor,
    context_columns: torch.Tensor,
    context_usage: torch.Tensor,
    *,
    block_size: int,
    window: int,
) -> torch.Tensor:
    """Return the block-diagonal mask of prompts concatenated in one row, bool ``[1, 1, Q, C × S + Q]``. Pure.

    Args:
        groups: Index of the sequence of each query, int64 ``[Q]``; -1 in padding.
        positions: Position of each query, int64 ``[Q]``.
        context_groups: Index of the sequence of each context block, int64 ``[C]``; -1 in padding.
        context_columns: Index of each context block within its sequence, int64 ``[C]``.
        context_usage: Filled slots of each context block, int64 ``[C]``.
        block_size: Tokens per block, S.
        window: Tokens that a query sees, itself included; 0: all.
    """
    offsets = torch.arange(block_size, device=groups.device)
    context = (context_columns[:, None] * block_size + offsets).flatten()
    filled = (offsets < context_usage[:, None]).flatten()
    owners = context_groups[:, None].expand(-1, block_size).flatten()
    keys = torch.cat([context, positions])
    real = torch.cat([filled & (owners >= 0), groups >= 0])
    same = groups[:, None] == torch.cat([owners, groups])
    return causal_mask(positions[None], keys[None], (same & real)[None], window)


def attend_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    query_lens: torch.Tensor | None,
    options: AttentionOptions,
    kernel: FusedSDPA | None,
) -> torch.Tensor:
    """Return attention outputs ``[B, Q, H, Dv]``; those of padding are finite but meaningless. Pure.

    Args:
        query: Queries, ``[B, Q, H, D]``.
        keys: Keys, ``[B, L, KV, D]``.
        values: Values, ``[B, L, KV, Dv]``.
        mask: Visibility, bool ``[B, 1, Q, L]``; None: causal attention with L = Q.
        query_lens: Number of real queries of each sequence, for a kernel without a mask; None with a mask.
        options: Attention options of the layer; the kernel supports only a scale.
        kernel: Fused attention kernel; used only if it supports the options. None: plain operations.
    """
    query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
    if kernel is not None and options.is_plain and keys.shape[-1] == values.shape[-1]:
        output = fused_attention(kernel, query, keys, values, mask=mask, query_lens=query_lens, scale=options.scale)
    else:
        output = attend(query, keys, values, mask=mask, options=options)
    return output.transpose(1, 2)
