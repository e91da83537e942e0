"""Attention of padded passes that a CUDA graph can hold: made from tensors on the device alone, whatever the host knows.

    facts [3, B] on the device ─▶ which block belongs to whom, what each query sees ─▶ flat paged attention
                               └▶ the kernel's own view of its sequences            ─▶ a kernel

Shapes: B sequences, Q queries of each, N blocks (from the bucket), S block size, T = B × Q tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trencadis.records import Bucket
from trencadis_torch.attention.kernel import KernelPass, StaticKernel
from trencadis_torch.attention.padded import FlatDecode
from trencadis_torch.cache.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from trencadis_torch.inputs import AttentionPass

__all__ = ["StaticFlatDecode", "StaticKernelPass", "static_decode"]


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


class StaticFlatDecode(FlatDecode):
    """A decode pass over gathered blocks, which the device lists itself.

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
        size, device = cache.block_size, facts.device
        rows, starts, lengths = facts
        counts = torch.where(lengths > 0, (starts + lengths + size - 1) // size, 0)
        ends = counts.cumsum(0)
        entries = torch.arange(bucket.num_blocks, device=device)
        # The first sequence whose blocks end behind the entry; behind all of them comes padding.
        owners = (entries[:, None] >= ends).sum(1)
        padding = owners == bucket.batch_size
        of = owners.clamp(max=bucket.batch_size - 1)
        columns = torch.where(padding, 0, entries - (ends - counts)[of])
        # The last real query of a sequence lends its position to the padding behind it.
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
