"""The size of a pass that holds a whole plan: which blocks several of its tokens read, and which only one does."""

from __future__ import annotations

import numpy as np

from trencadis.records import Int32Array, UnifiedShape

__all__ = ["unified_shape"]


def unified_shape(starts: Int32Array, query_lens: Int32Array, tables: Int32Array, *, block_size: int) -> UnifiedShape:
    """Return the shape of a pass; see :class:`UnifiedShape` for what shared and unique mean. Pure.

    Block tables say all that reference counts would, and more: only sequences of the pass read, and a sequence with several new
    tokens reads its blocks for each of them. Linear in the blocks that are read and in the highest id.

    Args:
        starts: Tokens computed before of each sequence, int32 ``[n]``, n at least 1.
        query_lens: New tokens of each, int32 ``[n]``.
        tables: Block ids of each, int32 ``[n, num_columns]``.
        block_size: Tokens per block.
    """
    # A single new token is written before the cache is read.
    num_cached = np.where(query_lens > 1, starts, starts + query_lens)
    num_read = -(-num_cached // block_size)
    width = int(num_read.max())
    blocks = tables[:, :width][np.arange(width) < num_read[:, None]]
    num_readers = np.bincount(blocks, weights=np.repeat(query_lens, num_read))
    unique = np.flatnonzero(num_readers == 1)
    return UnifiedShape(
        query_len=int(query_lens.sum()),
        num_blocks=int((num_readers > 1).sum()),
        num_unique_blocks=int(unique[-1]) + 1 if len(unique) else 0,
        is_causal=bool((query_lens > 1).any()),
    )
