"""The exponential tables of July 2025: sizes that coincide are filled up with unused ones, so that none is wasted.

Source: vllm-hpu-extension of 2025-07-07, bucketing/exponential.py.
"""

from __future__ import annotations

import math

from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.generate import with_drafts

__all__ = ["fill_range", "filled_decode_buckets", "filled_prefill_buckets"]


def fill_range(minimum: int, step: int, maximum: int, limit: int, *, exact_end: bool = False) -> list[int]:
    """Return at most ``limit`` sizes from ``minimum`` on in geometric progression, ascending. Pure.

    Where a size, rounded up to a multiple of ``step``, is taken already, the unused multiple nearest to it takes its
    place; once none is unused, the range is full. The largest size is ``maximum`` rounded up to ``step``.

    Args:
        minimum: Smallest size, at least 1.
        step: Sizes are multiples of it, at least 1.
        maximum: At least 1.
        limit: Most sizes; 1 leaves ``maximum`` alone.
        exact_end: The largest size is ``maximum`` itself.

    Raises:
        ValueError: ``limit`` is below 1.
    """
    if limit < 1:
        raise ValueError(f"a range of {limit} sizes from {minimum} to {maximum}: limit must be at least 1")
    if limit == 1:
        return [maximum]
    unused = set(range(minimum, maximum + 1, step))
    sizes: set[int] = set()
    for i in range(limit):
        # The order of operations is part of the definition, as in the current range.
        point = minimum * (maximum / minimum) ** ((1 / (limit - 1)) * i)
        size = maximum if exact_end and i == limit - 1 else math.ceil(point / step) * step
        if size in sizes:
            if not unused:
                break
            size = min(unused, key=lambda candidate: (abs(candidate - point), candidate))
        sizes.add(size)
        unused.discard(size)
    return sorted(sizes)


def filled_prefill_buckets(limits: BucketLimits, *, bs_limit: int, query_limit: int) -> tuple[Bucket, ...]:
    """Return every context that a query leaves room for in the budget, sorted; maybe none. Pure.

    Without prefix caching there is none with context.

    Args:
        limits: What bounds a shape.
        bs_limit: Number of batch sizes.
        query_limit: Number of query lengths.
    """
    block_size = limits.block_size
    found: set[Bucket] = set()
    for query_len in fill_range(block_size, block_size, limits.max_model_len, query_limit):
        most = (limits.max_model_len - query_len) // block_size if limits.prefix_caching else 0
        for batch_size in fill_range(1, 1, limits.max_prefill_batch_size, bs_limit):
            room = limits.max_num_batched_tokens // batch_size - query_len
            if room >= 0 and query_len <= limits.max_model_len:
                contexts = range(1 + min(most, room // block_size))
                found.update(Bucket(batch_size, query_len, context) for context in contexts)
    return tuple(sorted(found))


def filled_decode_buckets(
    limits: BucketLimits, *, bs_limit: int, block_limit: int, flat_drafts: bool
) -> tuple[Bucket, ...]:
    """Return all batch sizes with all counts of blocks up to the whole cache, sorted. Pure.

    The step of block counts is the block size, read as a count, and the largest count is the cache's rounded up to it:
    beyond what a pass can need where the cache is larger than its sequences.

    Args:
        limits: What bounds a shape.
        bs_limit: Number of batch sizes.
        block_limit: Number of block counts.
        flat_drafts: How passes with drafts are shaped.
    """
    step = limits.block_size
    counts = fill_range(step, step, limits.num_blocks, block_limit, exact_end=limits.contiguous)
    seeds = [
        Bucket(batch_size, 1, count, Phase.DECODE)
        for batch_size in fill_range(1, 1, limits.max_num_seqs, bs_limit)
        for count in counts
    ]
    return with_drafts(seeds, limits, flat=flat_drafts)
