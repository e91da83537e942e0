"""The exponential tables of July 2025: sizes that coincide are filled up with unused ones, so that none is wasted.

Source: vllm-hpu-extension of 2025-07-07, bucketing/exponential.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_plugins.bucketing.fallback import Sizes
from trencadis_plugins.bucketing.generate import with_drafts

__all__ = ["fill_range", "filled_decode_buckets", "filled_prefill_buckets", "filled_sizes"]


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


def filled_prefill_buckets(
    limits: BucketLimits, *, batch_sizes: Sequence[int], query_lens: Sequence[int]
) -> tuple[Bucket, ...]:
    """Return every context that a query leaves room for in the budget, sorted; maybe none. Pure.

    Without prefix caching there is none with context.

    Args:
        limits: Limits of a shape.
        batch_sizes: Sequences.
        query_lens: Tokens.
    """
    block_size = limits.block_size
    found: set[Bucket] = set()
    for query_len in query_lens:
        most = (limits.max_model_len - query_len) // block_size if limits.prefix_caching else 0
        for batch_size in batch_sizes:
            room = limits.max_num_batched_tokens // batch_size - query_len
            if room >= 0 and query_len <= limits.max_model_len:
                contexts = range(1 + min(most, room // block_size))
                found.update(Bucket(batch_size, query_len, context) for context in contexts)
    return tuple(sorted(found))


def filled_decode_buckets(
    limits: BucketLimits, *, batch_sizes: Sequence[int], num_blocks: Sequence[int], flat_drafts: bool
) -> tuple[Bucket, ...]:
    """Return all batch sizes with all counts of blocks, sorted. Pure.

    The largest count is the cache's rounded up: beyond what a pass can need where the cache is larger than its sequences.

    Args:
        limits: Limits of a shape.
        batch_sizes: Sequences.
        num_blocks: Blocks of all sequences together.
        flat_drafts: How passes with drafts are shaped.
    """
    seeds = [Bucket(batch_size, 1, count, Phase.DECODE) for batch_size in batch_sizes for count in num_blocks]
    return with_drafts(seeds, limits, flat=flat_drafts)


def filled_sizes(shape: Shape, *, block_size: int) -> Sizes:
    """Return the sizes of a fallback: sequences a power of two, new tokens whole blocks, KV blocks an even number. Pure.

    The query of a decode pass stays.

    Args:
        shape: Shape that needs a bucket.
        block_size: Tokens per block.
    """
    query_len = shape.query_len
    if shape.phase is Phase.PREFILL:
        query_len = -(-query_len // block_size) * block_size
    return 1 << (shape.batch_size - 1).bit_length(), query_len, shape.num_blocks + shape.num_blocks % 2
