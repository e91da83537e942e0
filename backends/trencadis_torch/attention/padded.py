"""Attention of padded passes: every tensor's shape follows from the bucket alone, as static-shape devices need.

    prefill   [B, Q] tokens, C context blocks each:   gather context ▶ append new keys ▶ masked attention
    decode    [B, Q] tokens, N blocks of all sequences: flat paged attention, block by block
    static    the same decode made from tensors on the device alone, so that a CUDA graph can capture it
    kernel    the CPU's kernel reads blocks in place: the number of blocks is no shape, and buckets that differ only in it share a graph

Padding tokens have id 0 and position 0 and write to the padding block. They attend to themselves, so that no softmax is empty.

Shapes: B sequences, Q queries, C or N blocks (from the bucket), S block size, H query heads, KV key-value heads, D head
dimension, T = B × Q tokens. Source: flat paged attention of the vLLM plugin for Gaudi, vllm_gaudi/extension/ops.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Bucket, Int32Array
from trencadis_torch.attention.adapter import AttentionPass
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.cache.kv_cache import KernelPass, PagedKVCache, StaticKernel
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device
from trencadis_torch.graphs.operators import kernel_attention

__all__ = [
    "FlatDecode",
    "PaddedDecode",
    "PaddedPrefill",
    "flat_block_lists",
    "flat_paged_attention",
    "StaticFlatDecode",
    "StaticKernelPass",
    "static_decode",
    "PaddedKernelPass",
]

FLOOR = -1e30
"""Stands for the maximum of an empty block: finite, so that differences of it are no NaN."""


class PaddedPrefill:
    """A prefill pass in a bucket. Made per pass, read by every layer.

    Args:
        cache: Written to.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]`` on the device.
        slots: Where new keys go, int64 ``[B × Q]``.
        rows: int64 ``[B]`` on the device; padding repeats some row.
        starts: Context length of each sequence, int64 ``[B]``; 0 for padding.
        query_lens: Queries of each, int64 ``[B]``; 0 for padding.
        bucket: The shape.

    Attributes:
        signature: Numbers that all shapes follow from.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_lens: torch.Tensor,
        bucket: Bucket,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self.signature = (bucket.phase.value, bucket.batch_size, bucket.query_len, bucket.num_blocks)
        self._shape = (bucket.batch_size, bucket.query_len)
        self._windows = {layer.index: layer.window for layer in cache.layers}
        columns = torch.arange(bucket.num_blocks, device=tables.device)
        held = columns * cache.block_size < starts[:, None]
        # A bucket may have more blocks than a table has columns.
        blocks = tables[rows[:, None], columns.clamp(max=tables.shape[1] - 1)].long()
        self._blocks = torch.where(held, blocks, cache.padding_block).flatten()
        self._masks = {
            window: _prefill_mask(starts, query_lens, bucket, cache.block_size, window)
            for window in set(self._windows.values())
        }

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[B × Q, H, Dv]``; as in ``RaggedPass``."""
        self._cache.write(layer_index, self._slots, keys, values)
        batch_size = self._shape[0]
        seen = []
        for cached, new in zip(self._cache.layer(layer_index), (keys, values), strict=True):
            context = decode(cached.index_select(0, self._blocks), new.dtype).view(batch_size, -1, *new.shape[1:])
            seen.append(torch.cat([context, torch.unflatten(new, 0, self._shape)], dim=1).transpose(1, 2))
        output = attend(
            torch.unflatten(query, 0, self._shape).transpose(1, 2),
            seen[0],
            seen[1],
            mask=self._masks[self._windows[layer_index]],
            options=options,
        )
        return output.transpose(1, 2).flatten(0, 1)


def _prefill_mask(
    starts: torch.Tensor, query_lens: torch.Tensor, bucket: Bucket, block_size: int, window: int
) -> torch.Tensor:
    """Return bool ``[B, 1, Q, C × S + Q]``: context below the start, then new tokens up to the query itself."""
    num_context, device = bucket.num_blocks * block_size, starts.device
    queries = torch.arange(bucket.query_len, device=device)
    context = torch.arange(num_context, device=device)
    starts = starts[:, None, None]
    see_context = (context < starts).expand(-1, bucket.query_len, -1)
    see_new = (queries[None, :] <= queries[:, None]) & (queries < query_lens[:, None, None])
    if window:
        see_context = see_context & (context > starts + queries[:, None] - window)
        see_new = see_new & (queries[None, :] > queries[:, None] - window)
    see_new = see_new | torch.eye(bucket.query_len, dtype=torch.bool, device=device)
    return torch.cat([see_context, see_new], dim=-1)[:, None]


class FlatDecode:
    """A decode pass over given blocks of all sequences, gathered in each layer.

    Args:
        cache: Written to.
        slots: Where new keys go, int64 ``[B × Q]``.
        bucket: The shape.
        blocks: Ids, int64 ``[N]``.
        mapping: bool ``[N, B]``, True where a block belongs to a sequence.
        keys: Positions of each block's keys, int64 ``[N, S]``.
        queries: Positions of the queries of each block's sequence, int64 ``[N, Q]``.
        padding: bool ``[N]``, blocks of no sequence.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        slots: torch.Tensor,
        bucket: Bucket,
        blocks: torch.Tensor,
        mapping: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        padding: torch.Tensor,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._shape = (bucket.batch_size, bucket.query_len)
        self._blocks = blocks
        self._mapping = mapping
        self._windows = {layer.index: layer.window for layer in cache.layers}
        self._masks = {window: _decode_mask(keys, queries, padding, window) for window in set(self._windows.values())}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[B × Q, H, Dv]``; as in ``RaggedPass``."""
        self._cache.write(layer_index, self._slots, keys, values)
        cached_keys, cached_values = self._cache.layer(layer_index)
        output = flat_paged_attention(
            torch.unflatten(query, 0, self._shape),
            decode(cached_keys.index_select(0, self._blocks), keys.dtype),
            decode(cached_values.index_select(0, self._blocks), values.dtype),
            mapping=self._mapping,
            mask=self._masks[self._windows[layer_index]],
            options=options,
        )
        return output.flatten(0, 1)


class PaddedDecode(FlatDecode):
    """A decode pass in a bucket, with drafts if the bucket's query length is above 1; its blocks are listed by the host.

    Args:
        cache: Written to.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]`` on the device.
        slots: Where new keys go, int64 ``[B × Q]``.
        rows: Row of each real sequence, on the host.
        starts: First query position of each, on the host.
        query_lens: Queries of each, on the host.
        bucket: The shape.

    Attributes:
        signature: Numbers that all shapes follow from.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: Int32Array,
        starts: Int32Array,
        query_lens: Int32Array,
        bucket: Bucket,
    ) -> None:
        self.signature = (bucket.phase.value, bucket.batch_size, bucket.query_len, bucket.num_blocks)
        size = cache.block_size
        counts = -(-(starts + query_lens) // size)
        owners, columns = flat_block_lists(counts, num_entries=bucket.num_blocks)
        real = owners >= 0
        # The last real query of a sequence lends its position to the padding after it.
        steps = np.minimum(np.arange(bucket.query_len), query_lens[:, None] - 1)
        # Entry -1 of the extended arrays is that of padding.
        positions = np.append(starts[:, None] + steps, np.zeros((1, bucket.query_len), np.int32), axis=0)[owners]
        facts = np.stack([np.append(rows, 0)[owners], np.where(real, columns, 0), owners]).astype(np.int64)
        device_rows, device_columns, groups = to_device(facts, tables.device)
        padding = groups < 0
        super().__init__(
            cache,
            slots=slots,
            bucket=bucket,
            blocks=torch.where(padding, cache.padding_block, tables[device_rows, device_columns].long()),
            mapping=groups[:, None] == torch.arange(bucket.batch_size, device=tables.device),
            keys=device_columns[:, None] * size + torch.arange(size, device=tables.device),
            queries=to_device(positions.astype(np.int64), tables.device),
            padding=padding,
        )


def flat_block_lists(counts: Int32Array, *, num_entries: int) -> tuple[Int32Array, Int32Array]:
    """Return the owner and the column of every block, sequence after sequence, padded with -1 to a bucket. Pure.

    Args:
        counts: Blocks of each sequence.
        num_entries: The bucket's blocks.

    Returns:
        ``owners``: the sequence of each entry, int32 ``[num_entries]``. ``columns``: index of the block within it.
    """
    owners, columns = np.full((2, num_entries), -1, np.int32)
    total = int(counts.sum())
    owners[:total] = np.repeat(np.arange(len(counts)), counts)
    columns[:total] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, columns


def _decode_mask(keys: torch.Tensor, queries: torch.Tensor, padding: torch.Tensor, window: int) -> torch.Tensor:
    """Return the mask of each block for its sequence's queries, bool ``[N, Q, S]``, from positions ``[N, S]``, ``[N, Q]``."""
    mask = keys[:, None, :] <= queries[:, :, None]
    if window:
        mask = mask & (keys[:, None, :] > queries[:, :, None] - window)
    return mask | padding[:, None, None]


def flat_paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mapping: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention outputs ``[B, Q, H, Dv]``: a softmax per block, then blocks of a sequence weighed together. Pure.

    Args:
        query: ``[B, Q, H, D]``.
        keys: Gathered blocks, ``[N, S, KV, D]``.
        values: ``[N, S, KV, Dv]``.
        mapping: bool ``[N, B]``, True where a block belongs to a sequence; a padding block's row is all False.
        mask: bool ``[N, Q, S]``, True where a query sees a key.
        options: Options of the layer.

    Source: online softmax over blocks, arXiv:1805.02867, section 3; grouping by one-hot products as in vllm_gaudi.
    """
    num_kv_heads = keys.shape[2]
    batch_size, query_len, num_heads, _ = query.shape
    groups = num_heads // num_kv_heads
    one_hot = mapping.to(query.dtype)
    by_block = (one_hot @ query.flatten(1)).view(-1, query_len, num_kv_heads, groups, query.shape[-1])
    scores = options.scores(torch.einsum("nqkgd,nskd->nqkgs", by_block, keys), query.shape[-1])
    scores = scores.masked_fill(~mask[:, :, None, None, :], float("-inf"))

    block_max = scores.amax(-1).clamp_min(FLOOR)  # [N, Q, KV, G]
    weights = torch.exp(scores - block_max[..., None])
    block_sum = weights.sum(-1)
    group_max = torch.where(mapping[:, :, None, None, None], block_max[:, None], FLOOR).amax(0)  # [B, Q, KV, G]
    if options.sinks is not None:
        heads = options.sinks.float().view(1, 1, num_kv_heads, groups)
        group_max = torch.maximum(group_max, heads)
    exact = mapping.float()
    shape = block_max.shape
    adjust = torch.exp(block_max - (exact @ group_max.flatten(1)).view(shape))
    total = (exact.T @ (block_sum * adjust).flatten(1)).view(batch_size, *shape[1:])
    if options.sinks is not None:
        total = total + torch.exp(heads - group_max)
    # Padding belongs to no sequence; its own sum keeps the division finite.
    total_by_block = torch.maximum((exact @ total.flatten(1)).view(shape), block_sum * adjust)
    share = (weights * (adjust / total_by_block)[..., None]).to(values.dtype)
    parts = torch.einsum("nqkgs,nskd->nqkgd", share, values)
    output = one_hot.T @ parts.flatten(1)
    return output.view(batch_size, query_len, num_heads, values.shape[-1])


def static_decode(
    facts: torch.Tensor, bucket: Bucket, *, slots: torch.Tensor, tables: torch.Tensor, cache: PagedKVCache
) -> AttentionPass:
    """Return the attention of a decode pass in a bucket; looks at nothing on the host.

    Args:
        facts: Row, start and query length of each sequence, 0 of padding, int64 ``[3, B]`` on the device.
        bucket: The shape.
        slots: Where new keys go, int64 ``[T]``.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        cache: Read and written.
    """
    if isinstance(cache.kernel, StaticKernel):
        rows, starts, query_lens = facts
        calls = cache.kernel.begin_static(
            cache,
            tables=tables,
            slots=slots,
            rows=rows,
            starts=starts,
            query_lens=query_lens,
            query_len=bucket.query_len,
        )
        return StaticKernelPass(calls)
    return StaticFlatDecode(facts, bucket, slots=slots, tables=tables, cache=cache)


class StaticKernelPass:
    """A padded pass that a kernel attends for; padding attends to nothing and yields 0.

    Args:
        calls: Calls of the kernel.
    """

    def __init__(self, calls: KernelPass) -> None:
        self._calls = calls

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``; as in ``RaggedPass``."""
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        self._calls.attend(layer_index, query, keys, values, output=output, options=options)
        return output


class StaticFlatDecode(FlatDecode):
    """A decode pass over gathered blocks, which the device lists itself.

    Args:
        facts: Facts of the sequences; see :func:`static_decode`.
        bucket: Bucket of the pass.
        slots: Places of new keys and values.
        tables: Block tables of all rows.
        cache: Keys and values.
    """

    def __init__(
        self, facts: torch.Tensor, bucket: Bucket, *, slots: torch.Tensor, tables: torch.Tensor, cache: PagedKVCache
    ) -> None:
        size, device = cache.block_size, facts.device
        rows, starts, lengths = facts
        counts = torch.where(lengths > 0, (starts + lengths + size - 1) // size, 0)
        ends = counts.cumsum(0)
        entries = torch.arange(bucket.num_blocks, device=device)
        # The first sequence whose blocks end after the entry; padding follows the last one.
        owners = (entries[:, None] >= ends).sum(1)
        padding = owners == bucket.batch_size
        of = owners.clamp(max=bucket.batch_size - 1)
        columns = torch.where(padding, 0, entries - (ends - counts)[of])
        # The last real query of a sequence lends its position to the padding after it.
        steps = torch.minimum(torch.arange(bucket.query_len, device=device), (lengths[of] - 1).clamp(min=0)[:, None])
        super().__init__(
            cache,
            slots=slots,
            bucket=bucket,
            blocks=torch.where(padding, cache.padding_block, tables[rows[of], columns].long()),
            mapping=owners[:, None] == torch.arange(bucket.batch_size, device=device),
            keys=columns[:, None] * size + torch.arange(size, device=device),
            queries=starts[of][:, None] + steps,
            padding=padding,
        )


class PaddedKernelPass:
    """A prefill or decode pass in a bucket. Made per pass, read by every layer.

    Args:
        cache: Written to; has a kernel.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        slots: Where new keys go, int64 ``[B × Q]``.
        facts: Row, context length and queries of each sequence, int64 ``[3, B]``; padding has no queries.
        bucket: The shape.

    Raises:
        StepFailedError: The bucket is too small: the kernel would read what is not there.

    Attributes:
        signature: Numbers that all shapes follow from.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        facts: npt.NDArray[np.int64],
        bucket: Bucket,
    ) -> None:
        if (facts[2] > bucket.query_len).any():
            raise StepFailedError(
                f"{bucket} has room for {bucket.query_len} tokens of a sequence; one brings {facts[2].max()}.",
                hint="A bucketing strategy must return a bucket that covers the pass.",
            )
        self.signature = ("kernel", bucket.batch_size, bucket.query_len)
        self._cache = cache
        self._tables = tables
        self._slots = slots.contiguous()
        self._windows = {layer.index: layer.window for layer in cache.layers}
        sequences = np.empty((4, bucket.batch_size), np.int32)
        sequences[:3] = facts
        sequences[3] = np.arange(bucket.batch_size) * bucket.query_len
        self._sequences = torch.from_numpy(sequences)

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[B × Q, H, Dv]``; as in ``RaggedPass``."""
        cached_keys, cached_values = self._cache.layer(layer_index)
        return kernel_attention(
            query,
            keys,
            values,
            cached_keys,
            cached_values,
            self._tables,
            self._slots,
            self._sequences,
            self._windows[layer_index],
            options=options,
        )
