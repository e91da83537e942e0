"""A prefill pass as tensors: a rectangle of sequences, each with its context blocks.

Shapes: B sequences, Q queries of each, C context blocks of each (from the bucket), S tokens per block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Int32Array, Int64Array, Pass
from trencadis_gaudi.attention.fused_sdpa import FusedSDPA
from trencadis_gaudi.attention.prefill import attend_prefill, batch_mask, with_context
from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_gaudi.passes.block_lists import token_slots
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.device import to_device

__all__ = ["GaudiPrefill", "PrefillTensors", "prefill_tensors"]


class PrefillTensors(NamedTuple):
    """Inputs of a captured prefill graph about its pass.

    Attributes:
        slots: Slot of each new key and value, int64 ``[B, Q]``.
        blocks: Context block ids, followed by the padding block, int64 ``[B, C]``.
        context_lens: Number of tokens computed before, int64 ``[B]``.
        query_lens: Number of new tokens, int64 ``[B]``; 0 in padding.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    context_lens: torch.Tensor
    query_lens: torch.Tensor


def prefill_tensors(one: Pass, tables: Int32Array, cache: FlatKVCache) -> PrefillTensors:
    """Return the tensors of a prefill pass, with shapes determined by its bucket.

    Args:
        one: Prefill pass; without sequences it has only padding.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        cache: Cache, read for sizes only.

    Raises:
        StepFailedError: The bucket is too small for the pass.
    """
    bucket, size = one.bucket, cache.block_size
    needed = -(-int(one.starts.max(initial=0)) // size)
    if needed > bucket.num_blocks:
        raise StepFailedError(
            f"{bucket} has room for {bucket.num_blocks} context blocks a sequence; one needs {needed}.",
            hint="A bucketing strategy must return a bucket that covers the pass.",
        )
    lengths = np.zeros((2, bucket.batch_size), np.int64)
    lengths[:, : len(one.rows)] = one.starts, one.query_lens
    slots = token_slots(
        tables,
        one.rows,
        one.starts,
        one.query_lens,
        batch_size=bucket.batch_size,
        query_len=bucket.query_len,
        block_size=size,
        padding_block=cache.padding_block,
    )
    blocks = _context_blocks(one, tables, cache)
    return PrefillTensors(*(to_device(array, cache.device) for array in (slots, blocks, *lengths)))


def _context_blocks(one: Pass, tables: Int32Array, cache: FlatKVCache) -> Int64Array:
    bucket = one.bucket
    blocks = np.full((bucket.batch_size, bucket.num_blocks), cache.padding_block, np.int64)
    # A bucket may have more blocks than a table has columns.
    width = min(bucket.num_blocks, tables.shape[1])
    held = np.arange(width) * cache.block_size < one.starts[:, None]
    blocks[: len(one.rows), :width] = np.where(held, tables[one.rows, :width], cache.padding_block)
    return blocks


class GaudiPrefill:
    """Attention of a prefill pass, made inside the graph from tensors only and used by every layer.

    Args:
        cache: Cache to write to.
        tensors: Tensors of the pass.
        kernel: Fused attention kernel; None: plain operations.
    """

    def __init__(self, cache: FlatKVCache, tensors: PrefillTensors, *, kernel: FusedSDPA | None) -> None:
        self._tensors = tensors
        self._kernel = kernel
        # Made before the first layer; made within a layer, they would be outputs of its graph, which other layers could not share.
        self._masks = {
            window: self._mask(window, cache.block_size) for window in sorted({layer.window for layer in cache.layers})
        }

    def attend(
        self,
        layer: FlatLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[B × Q, H, Dv]``, as defined in ``attention/adapter.py``."""
        slots, blocks, _, query_lens = self._tensors
        layer.write(slots.flatten(), keys, values)
        new_keys, new_values = (torch.unflatten(new, 0, slots.shape) for new in (keys, values))
        seen = with_context(layer, blocks, new_keys, new_values)
        output = attend_prefill(
            torch.unflatten(query, 0, slots.shape),
            *seen,
            mask=self._masks[layer.window],
            query_lens=query_lens,
            options=options,
            kernel=self._kernel,
        )
        return output.flatten(0, 1)

    def _mask(self, window: int, block_size: int) -> torch.Tensor | None:
        """Return the mask of the layers of a window; None if causal attention needs no mask."""
        slots, blocks, context_lens, query_lens = self._tensors
        if not blocks.numel() and not window:
            return None
        return batch_mask(
            context_lens,
            query_lens,
            num_context=blocks.shape[1] * block_size,
            query_len=slots.shape[1],
            window=window,
        )
