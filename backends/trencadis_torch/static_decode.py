"""Attention of padded passes that a CUDA graph can hold: made from tensors on the device alone, whatever the host knows.

    facts [3, B] on the device ─▶ which block belongs to whom, what each query sees ─▶ flat paged attention
                               └▶ the kernel's own view of its sequences            ─▶ a kernel

Shapes: B sequences, Q queries of each, N blocks (from the bucket), S block size, T = B × Q tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trencadis.records import Bucket
from trencadis_torch.kv_cache import PagedKVCache
from trencadis_torch.kv_storage import decode
from trencadis_torch.padded import flat_paged_attention
from trencadis_torch.paged_kernel import KernelPass, StaticKernel

if TYPE_CHECKING:
    from trencadis_torch.inputs import AttentionPass

__all__ = ["FlatDecode", "StaticKernelPass", "static_decode"]


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
    return FlatDecode(facts, bucket, slots=slots, tables=tables, cache=cache)


class StaticKernelPass:
    """A padded pass that a kernel attends for; padding attends to nothing and yields 0.

    Args:
        calls: Of the kernel.
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
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``; as in ``RaggedPass``."""
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        self._calls.attend(layer_index, query, keys, values, output=output, scale=scale, softcap=softcap, sinks=sinks)
        return output


class FlatDecode:
    """A decode pass over gathered blocks: what ``PaddedDecode`` computes, its lists of blocks made on the device.

    Args:
        facts: As in :func:`static_decode`.
        bucket: The same.
        slots: The same.
        tables: The same.
        cache: The same.
    """

    def __init__(
        self, facts: torch.Tensor, bucket: Bucket, *, slots: torch.Tensor, tables: torch.Tensor, cache: PagedKVCache
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._shape = (bucket.batch_size, bucket.query_len)
        self._windows = {layer.index: layer.window for layer in cache.layers}
        size, device = cache.block_size, facts.device
        rows, starts, lengths = facts
        counts = torch.where(lengths > 0, (starts + lengths + size - 1) // size, 0)
        ends = counts.cumsum(0)
        entries = torch.arange(bucket.num_blocks, device=device)
        # The first sequence whose blocks end behind the entry; behind all of them comes padding.
        owners = (entries[:, None] >= ends).sum(1)
        is_padding = owners == bucket.batch_size
        of = owners.clamp(max=bucket.batch_size - 1)
        columns = torch.where(is_padding, 0, entries - (ends - counts)[of])
        blocks = tables[rows[of], columns].long()
        self._blocks = torch.where(is_padding, cache.padding_block, blocks)
        self._mapping = owners[:, None] == torch.arange(bucket.batch_size, device=device)
        # The last real query of a sequence lends its position to the padding behind it.
        steps = torch.minimum(torch.arange(bucket.query_len, device=device), (lengths[of] - 1).clamp(min=0)[:, None])
        queries = starts[of][:, None] + steps
        keys = columns[:, None] * size + torch.arange(size, device=device)
        self._masks = {window: _visible(keys, queries, is_padding, window) for window in set(self._windows.values())}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``; as in ``RaggedPass``."""
        self._cache.write(layer_index, self._slots, keys, values)
        cached_keys, cached_values = self._cache.layer(layer_index)
        output = flat_paged_attention(
            torch.unflatten(query, 0, self._shape),
            decode(cached_keys.index_select(0, self._blocks), keys.dtype),
            decode(cached_values.index_select(0, self._blocks), values.dtype),
            mapping=self._mapping,
            mask=self._masks[self._windows[layer_index]],
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            sinks=sinks,
        )
        return output.flatten(0, 1)


def _visible(keys: torch.Tensor, queries: torch.Tensor, padding: torch.Tensor, window: int) -> torch.Tensor:
    """Return what queries see of each block, bool ``[N, Q, S]``; of padding everything, so that no softmax is empty."""
    mask = keys[:, None, :] <= queries[:, :, None]
    if window:
        mask = mask & (keys[:, None, :] > queries[:, :, None] - window)
    return mask | padding[:, None, None]
