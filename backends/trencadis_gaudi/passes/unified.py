"""A unified pass as tensors: prefills and decodes in one row of tokens, with the cache blocks that they read.

    context of a sequence    prompts: the tokens computed before; decodes: those and the current one, which is read back
    shared block             read for more than one token of the pass: gathered, every token against every shared block
    unique block             read for one token: the cache from its first block on, each block against its own token

The context of a prompt chunk of several tokens therefore counts as shared.

Shapes: T tokens, n sequences, M shared blocks, U unique blocks (from the bucket), R sequences at most, S tokens per block.
Source: vllm-gaudi v0.11.2, extension/unified_batch.py.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np
import torch

from trencadis.errors import StepFailedError
from trencadis.records import BoolArray, Int32Array, Int64Array, Pass, UnifiedBucket, UnifiedShape
from trencadis_gaudi.attention.unified import Part, block_part, causal_part, dense_part, merge_parts, sink_part
from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_gaudi.passes.block_lists import owned_blocks
from trencadis_gaudi.passes.flat_tokens import FlatTokens, flat_tokens
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.device import to_device

__all__ = ["GaudiUnified", "UnifiedTensors", "unified_tensors", "UnifiedBatch", "cached_tokens", "unified_batch"]


@attrs.frozen(kw_only=True)
class UnifiedBatch:
    """Shared and unique blocks of a pass.

    Attributes:
        cached: Number of tokens that each sequence reads from the cache, int32 ``[n]``.
        is_causal: Whether each sequence attends to its new tokens directly, bool ``[n]``.
        shared: Ids of distinct shared blocks, ascending, int64 ``[M]``.
        shared_columns: Index of each shared block within each sequence, int64 ``[n, M]``; -1: not a block of the sequence.
        unique: Ids of unique blocks, int64 ``[num_unique_refs]``.
        unique_groups: Index of the sequence of each unique block, int64 ``[num_unique_refs]``.
        unique_columns: Index of each unique block within its sequence, int64 ``[num_unique_refs]``.
        shape: Minimum shape of a bucket for the pass.
    """

    cached: Int32Array
    is_causal: BoolArray
    shared: Int64Array
    shared_columns: Int64Array
    unique: Int64Array
    unique_groups: Int64Array
    unique_columns: Int64Array
    shape: UnifiedShape


def cached_tokens(starts: Int32Array, query_lens: Int32Array, prompt_lens: Int32Array) -> Int32Array:
    """Return the number of tokens that each sequence reads from the cache, without the new tokens of a prompt, as in the source.

    Args:
        starts: Number of tokens computed before, int32 ``[n]``.
        query_lens: Number of new tokens of each sequence, int32 ``[n]``.
        prompt_lens: Prompt length of each sequence, int32 ``[n]``.
    """
    is_prompt = starts + query_lens <= prompt_lens
    return np.where(is_prompt, starts, starts + query_lens).astype(np.int32)


def unified_batch(one: Pass, tables: Int32Array, *, block_size: int, cached: Int32Array | None = None) -> UnifiedBatch:
    """Return the shared and unique blocks of a pass.

    Args:
        one: Unified pass; its bucket is not read.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        block_size: Tokens per block.
        cached: Number of tokens that each sequence reads from the cache: its computed tokens, or these and its only new one; None:
            a sequence with several new tokens counts as a prompt.
    """
    if cached is None:
        cached = np.where(one.query_lens > 1, one.starts, one.starts + one.query_lens).astype(np.int32)
    owned = owned_blocks(tables, one.rows, np.zeros_like(cached), -(-cached // block_size))
    distinct, index = np.unique(owned.blocks, return_inverse=True)
    readers = np.bincount(index, weights=one.query_lens[owned.groups], minlength=len(distinct))
    is_shared = readers > 1
    columns = np.full((len(one.rows), len(distinct)), -1, np.int64)
    columns[owned.groups, index] = owned.columns
    alone = ~is_shared[index]
    unique = owned.blocks[alone]
    is_causal = cached == one.starts
    return UnifiedBatch(
        cached=cached,
        is_causal=is_causal,
        shared=distinct[is_shared],
        shared_columns=columns[:, is_shared],
        unique=unique,
        unique_groups=owned.groups[alone],
        unique_columns=owned.columns[alone],
        shape=UnifiedShape(
            query_len=int(one.query_lens.sum()),
            num_blocks=int(is_shared.sum()),
            num_unique_blocks=int(unique.max(initial=-1)) + 1,
            is_causal=bool(is_causal.any()),
        ),
    )


class UnifiedTensors(NamedTuple):
    """Inputs of a captured unified graph about its pass; int64.

    A bias for every token and slot of the shared blocks would transfer T × M × S numbers; columns of the blocks are R × M.

    Attributes:
        causal: Empty, or one array ``[T]``: index of the sequence of each token that attends to new tokens directly, else -1.
        slots: Slot of each new key and value, ``[T]``.
        positions: Position of each token, ``[T]``; 0 in padding.
        groups: Index of the sequence of each token, ``[T]``; R in padding.
        cached: Number of tokens that each sequence reads from the cache, ``[R + 1]``; 0 in the last entry, which is for padding.
        shared: Shared block ids, followed by the padding block, ``[M]``.
        shared_columns: Index of each shared block within each sequence, ``[R + 1, M]``; -1: not a block of the sequence.
        unique_tokens: Index of the token that owns block ``i`` of the cache, ``[U]``; -1: none.
        unique_columns: Index of block ``i`` within its sequence, ``[U]``.
    """

    causal: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor
    cached: torch.Tensor
    shared: torch.Tensor
    shared_columns: torch.Tensor
    unique_tokens: torch.Tensor
    unique_columns: torch.Tensor


def unified_tensors(
    one: Pass, batch: UnifiedBatch, tables: Int32Array, cache: FlatKVCache, *, bucket: UnifiedBucket
) -> UnifiedTensors:
    """Return the tensors of a unified pass, with shapes determined by its bucket, the cache and the number of rows.

    Args:
        one: Unified pass; its own bucket is not read.
        batch: Shared and unique blocks of the pass.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        cache: Cache, read for sizes only.
        bucket: Bucket to run in.

    Raises:
        StepFailedError: The bucket is too small for the pass.
    """
    if not bucket.covers(batch.shape):
        raise StepFailedError(
            f"a unified pass needs {batch.shape}; its bucket is {bucket}.",
            hint="A bucketing strategy must return a bucket that covers the pass.",
        )
    num_groups = min(len(tables), bucket.query_len)
    tokens = flat_tokens(one, tables, cache, num_tokens=bucket.query_len)
    cached = np.zeros(num_groups + 1, np.int64)
    cached[: len(one.rows)] = batch.cached
    shared = np.full(bucket.num_blocks, cache.padding_block, np.int64)
    shared[: len(batch.shared)] = batch.shared
    columns = np.full((num_groups + 1, bucket.num_blocks), -1, np.int64)
    columns[: len(one.rows), : len(batch.shared)] = batch.shared_columns
    groups = np.where(tokens.groups < 0, num_groups, tokens.groups)
    arrays = (
        tokens.slots,
        tokens.positions,
        groups,
        cached,
        shared,
        columns,
        *_unique(batch, tokens, num_entries=min(bucket.num_unique_blocks, cache.num_blocks + 1)),
    )
    causal = (_causal_owners(batch, tokens),) if bucket.is_causal else ()
    return UnifiedTensors(
        tuple(to_device(array, cache.device) for array in causal), *(to_device(array, cache.device) for array in arrays)
    )


def _unique(batch: UnifiedBatch, tokens: FlatTokens, *, num_entries: int) -> tuple[Int64Array, Int64Array]:
    """Return the owning token and the column of each block in the range read."""
    owners = np.full(num_entries, -1, np.int64)
    columns = np.zeros(num_entries, np.int64)
    # The sequence of a unique block has one new token, its first.
    owners[batch.unique] = tokens.firsts[batch.unique_groups]
    columns[batch.unique] = batch.unique_columns
    return owners, columns


def _causal_owners(batch: UnifiedBatch, tokens: FlatTokens) -> Int64Array:
    # Entry -1 is for padding.
    return np.append(np.where(batch.is_causal, np.arange(len(batch.is_causal)), -1), -1)[tokens.groups]


class GaudiUnified:
    """Attention of a unified pass, made inside the graph from tensors only and used by every layer.

    Args:
        cache: Cache to write to.
        tensors: Tensors of the pass.
    """

    def __init__(self, cache: FlatKVCache, tensors: UnifiedTensors) -> None:
        self._block_size = cache.block_size
        self._tensors = tensors
        windows = sorted({layer.window for layer in cache.layers})
        self._seen = {window: self._seen_of_shared(window) for window in windows}
        self._spans = {window: self._span_of_unique(window) for window in windows}

    def attend(
        self,
        layer: FlatLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``, as defined in ``attention/adapter.py``."""
        layer.write(self._tensors.slots, keys, values)
        parts = self._cached_parts(layer, query, options=options)
        for owners in self._tensors.causal:
            parts.append(
                causal_part(
                    query,
                    keys,
                    values,
                    owners=owners,
                    positions=self._tensors.positions,
                    window=layer.window,
                    options=options,
                )
            )
        if options.sinks is not None and parts:
            parts.append(sink_part(options.sinks, parts[0]))
        if not parts:
            # A bucket without any part has no real tokens, and outputs of padding are never read.
            return query.new_zeros(*query.shape[:2], values.shape[-1])
        return merge_parts(parts).to(values.dtype)

    def _cached_parts(self, layer: FlatLayer, query: torch.Tensor, *, options: AttentionOptions) -> list[Part]:
        parts = []
        shared, owners = self._tensors.shared, self._tensors.unique_tokens
        if shared.numel():
            keys, values = (part.flatten(0, 1) for part in layer.gather(shared))
            parts.append(dense_part(query, keys, values, seen=self._seen[layer.window], options=options))
        if owners.numel():
            keys, values = layer.first(len(owners))
            usage, skipped = self._spans[layer.window]
            parts.append(block_part(query, keys, values, owners=owners, usage=usage, skipped=skipped, options=options))
        return parts

    def _seen_of_shared(self, window: int) -> torch.Tensor:
        """Return whether each token sees each slot of the shared blocks, bool ``[T, M × S]``."""
        tensors, size = self._tensors, self._block_size
        own = tensors.shared_columns.index_select(0, tensors.groups)[:, :, None]
        keys = own * size + torch.arange(size, device=own.device)
        seen = (own >= 0) & (keys < tensors.cached.index_select(0, tensors.groups)[:, None, None])
        if window:
            seen = seen & (keys > tensors.positions[:, None, None] - window)
        return seen.flatten(1)

    def _span_of_unique(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filled slots of each unique block, and the slots before its token's window, each ``[U]``."""
        tensors, size = self._tensors, self._block_size
        owners = tensors.unique_tokens.clamp(min=0)
        begins = tensors.unique_columns * size
        filled = tensors.cached.index_select(0, tensors.groups.index_select(0, owners)) - begins
        if not window:
            return filled, torch.zeros_like(filled)
        return filled, tensors.positions.index_select(0, owners) - window + 1 - begins
