"""A merged prefill pass: prompts are concatenated in one row, and no token sees another prompt.

With prompts of different lengths this pads less than a rectangle, but needs a mask of all tokens by all tokens.

Shapes: Q queries of all sequences together, C context blocks of all sequences together, S tokens per block.
Source: vllm-gaudi, VLLM_MERGED_PREFILL.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Int32Array, Pass
from trencadis_gaudi.attention.fused_sdpa import FusedSDPA
from trencadis_gaudi.attention.prefill import attend_prefill, merged_mask, with_context
from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_gaudi.passes.block_lists import gathered_lists, owned_blocks, seen_slots
from trencadis_gaudi.passes.flat_tokens import flat_tokens
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.device import to_device

__all__ = ["CONTEXT_STEP", "GaudiMergedPrefill", "MergedTensors", "merged_tensors"]

CONTEXT_STEP = 32
"""Context blocks of a merged pass are rounded up to a multiple of this."""


class MergedTensors(NamedTuple):
    """Inputs of a captured graph of a merged prefill about its pass; int64.

    Attributes:
        slots: Slot of each new key and value, ``[Q]``.
        groups: Index of the sequence of each query, ``[Q]``; -1 in padding.
        positions: Position of each query, ``[Q]``; 0 in padding.
        blocks: Context blocks of the sequences, concatenated, ``[1, C]``.
        block_groups: Index of the sequence of each context block, ``[C]``; -1 in padding.
        block_columns: Index of each context block within its sequence, ``[C]``.
        block_usage: Filled slots of each context block, ``[C]``.
    """

    slots: torch.Tensor
    groups: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    block_groups: torch.Tensor
    block_columns: torch.Tensor
    block_usage: torch.Tensor


def merged_tensors(one: Pass, tables: Int32Array, cache: FlatKVCache) -> MergedTensors:
    """Return the tensors of a merged prefill pass, with shapes determined by its bucket.

    Args:
        one: Merged prefill pass. Its bucket counts all sequences together: one row, ``query_len`` queries, ``num_blocks`` context
            blocks.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        cache: Cache, read for sizes only.

    Raises:
        StepFailedError: The bucket is too small for the pass.
    """
    bucket, size = one.bucket, cache.block_size
    num_entries = -(-bucket.num_blocks // CONTEXT_STEP) * CONTEXT_STEP
    tokens = flat_tokens(one, tables, cache, num_tokens=bucket.query_len)
    owned = owned_blocks(tables, one.rows, np.zeros_like(one.starts), -(-one.starts // size))
    if len(owned.blocks) > num_entries:
        raise StepFailedError(
            f"{bucket} has room for {num_entries} context blocks of all its sequences; they need {len(owned.blocks)}.",
            hint="A bucketing strategy must return a bucket that covers the pass.",
        )
    lists = gathered_lists(owned, num_entries=num_entries, padding_block=cache.padding_block)
    # The last context token sees all filled slots of a block.
    usage, _ = seen_slots(lists, one.starts[:, None].astype(np.int64) - 1, block_size=size)
    arrays = (
        tokens.slots,
        tokens.groups,
        tokens.positions,
        lists.blocks[None],
        lists.groups,
        lists.columns,
        usage[:, 0].astype(np.int64),
    )
    return MergedTensors(*(to_device(array, cache.device) for array in arrays))


class GaudiMergedPrefill:
    """Attention of a merged prefill pass, made inside the graph from tensors only and used by every layer.

    Args:
        cache: Cache to write to.
        tensors: Tensors of the pass.
        kernel: Fused attention kernel; None: plain operations.
    """

    def __init__(self, cache: FlatKVCache, tensors: MergedTensors, *, kernel: FusedSDPA | None) -> None:
        self._slots = tensors.slots
        self._blocks = tensors.blocks
        self._kernel = kernel
        self._masks = {
            window: merged_mask(
                tensors.groups,
                tensors.positions,
                tensors.block_groups,
                tensors.block_columns,
                tensors.block_usage,
                block_size=cache.block_size,
                window=window,
            )
            for window in {layer.window for layer in cache.layers}
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
        """Store new keys and values, and return attention outputs ``[Q, H, Dv]``, as defined in ``attention/adapter.py``."""
        layer.write(self._slots, keys, values)
        seen = with_context(layer, self._blocks, keys[None], values[None])
        output = attend_prefill(
            query[None],
            *seen,
            mask=self._masks[layer.window],
            query_lens=None,
            options=options,
            kernel=self._kernel,
        )
        return output[0]
