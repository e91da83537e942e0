"""A decode pass as tensors, made on the host before the graph and read by every layer inside it.

Shapes: B sequences, Q queries of each, N blocks (from the bucket), S tokens per block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Int32Array, Pass
from trencadis_gaudi.attention.flat import flat_attention, slot_bias
from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_gaudi.passes.block_lists import (
    BlockLists,
    OwnedBlocks,
    gathered_lists,
    owned_blocks,
    query_positions,
    ranged_lists,
    seen_slots,
    token_slots,
    window_entries,
)
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.device import to_device

__all__ = ["BlockTensors", "DecodeTensors", "GaudiDecode", "decode_tensors"]


class BlockTensors(NamedTuple):
    """Blocks that the layers of one window read; tensors of the device.

    Attributes:
        blocks: Block ids, int64 ``[N]``.
        groups: Index of the sequence of each block, int64 ``[N]``; -1 in padding.
        usage: End of the slots of each block that a query sees, int32 ``[N, Q]``.
        skipped: Start of the slots of each block that a query sees, int32 ``[N, Q]``.
    """

    blocks: torch.Tensor
    groups: torch.Tensor
    usage: torch.Tensor
    skipped: torch.Tensor


class DecodeTensors(NamedTuple):
    """Inputs of a captured decode graph about its pass.

    Attributes:
        slots: Slot of each new key and value, int64 ``[B, Q]``.
        lists: Blocks for each window among the model's layers, in ascending order; window 0: all tokens.
    """

    slots: torch.Tensor
    lists: tuple[BlockTensors, ...]


def decode_tensors(one: Pass, tables: Int32Array, cache: FlatKVCache, *, contiguous: bool) -> DecodeTensors:
    """Return the tensors of a decode pass, with shapes determined by its bucket and the cache.

    The list of all blocks has the bucket's length, with ``contiguous`` at most the cache's length including the padding block.
    Layers with a window get a separate list, which is gathered by id in both cases.

    Args:
        one: Decode pass; without sequences it has only padding.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        cache: Cache, read for sizes only.
        contiguous: Whether the cache is read by range.

    Raises:
        StepFailedError: The bucket is too small for the pass, or a block that is read by range has two owners.
    """
    bucket, size = one.bucket, cache.block_size
    positions = query_positions(one.starts, one.query_lens, query_len=bucket.query_len)
    ends = -(-(one.starts + one.query_lens) // size)
    num_entries = min(bucket.num_blocks, cache.num_blocks + 1) if contiguous else bucket.num_blocks
    lists = []
    for window in _windows(cache):
        firsts, entries = np.zeros_like(ends), num_entries
        if window:
            firsts = (np.maximum(one.starts - window + 1, 0) // size).astype(np.int32)
            entries = window_entries(
                num_entries,
                batch_size=bucket.batch_size,
                query_len=bucket.query_len,
                window=window,
                block_size=size,
            )
        owned = owned_blocks(tables, one.rows, firsts, ends)
        part = _lists(owned, entries, cache.padding_block, one, by_range=contiguous and not window)
        arrays = (part.blocks, part.groups, *seen_slots(part, positions, block_size=size, window=window))
        lists.append(BlockTensors(*(to_device(array, cache.device) for array in arrays)))
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
    return DecodeTensors(to_device(slots, cache.device), tuple(lists))


def _windows(cache: FlatKVCache) -> list[int]:
    return sorted({layer.window for layer in cache.layers})


def _lists(owned: OwnedBlocks, num_entries: int, padding_block: int, one: Pass, *, by_range: bool) -> BlockLists:
    needed = len(owned.blocks) if not by_range else int(owned.blocks.max(initial=-1)) + 1
    if needed > num_entries:
        raise StepFailedError(
            f"{one.bucket} has room for {num_entries} blocks; its sequences need {needed}.",
            hint="A bucketing strategy must return a bucket that covers the pass.",
        )
    if not by_range:
        return gathered_lists(owned, num_entries=num_entries, padding_block=padding_block)
    if len(np.unique(owned.blocks)) < len(owned.blocks):
        raise StepFailedError(
            "two sequences share a block, and the KV cache is read by range, where a block has one owner.",
            hint="Turn prefix caching or contiguous blocks off.",
        )
    return ranged_lists(owned, num_entries=num_entries, padding_block=padding_block)


class GaudiDecode:
    """Attention of a decode pass, made inside the graph from tensors only and used by every layer.

    Args:
        cache: Cache to write to.
        tensors: Tensors of the pass.
        contiguous: Whether the cache is read by range, as in :func:`decode_tensors`.
    """

    def __init__(self, cache: FlatKVCache, tensors: DecodeTensors, *, contiguous: bool) -> None:
        self._slots = tensors.slots
        self._contiguous = contiguous
        self._lists = dict(zip(_windows(cache), tensors.lists, strict=True))
        self._biases = {
            window: slot_bias(part.usage, part.skipped, cache.block_size) for window, part in self._lists.items()
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
        layer.write(self._slots.flatten(), keys, values)
        part = self._lists[layer.window]
        by_range = self._contiguous and not layer.window
        cached_keys, cached_values = layer.first(len(part.blocks)) if by_range else layer.gather(part.blocks)
        output = flat_attention(
            torch.unflatten(query, 0, self._slots.shape),
            cached_keys,
            cached_values,
            groups=part.groups,
            bias=self._biases[layer.window],
            options=options,
        )
        return output.flatten(0, 1)
