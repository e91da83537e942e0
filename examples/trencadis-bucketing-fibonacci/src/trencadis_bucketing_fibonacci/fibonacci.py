"""Sizes 1, 2, 3, 5, 8, 13 … in every dimension."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape

from trencadis_bucketing_fibonacci.config import FibonacciConfig

__all__ = ["Fibonacci", "fibonacci_sizes"]


class Fibonacci(BucketingStrategy):
    """Prepares prefills of one prompt, with and without context, and decodes of every number of sequences up to the limit.

    Neighbouring Fibonacci numbers differ by a factor of r = 1.618. Of sizes spread evenly between two of them, a share of
    1 - (1 + r) / 2r = 19 % is padding; doubling has 25 %. A prefill of several prompts at once runs as it is.

    Args:
        limits: What bounds every legal shape.
        config: Where the sizes start.

    Source: OEIS A000045; the ratio of neighbours tends to (1 + √5) / 2.
    """

    def __init__(self, limits: BucketLimits, config: FibonacciConfig | None = None) -> None:
        self._smallest_query = (config or FibonacciConfig()).smallest_query
        self._axes = {phase: self._sizes(limits, phase) for phase in Phase}

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return every combination of sizes, prefill before decode. Pure."""
        return tuple(
            Bucket(batch_size, query_len, num_blocks, phase)
            for phase in (Phase.PREFILL, Phase.DECODE)
            for axes in (self._sizes(limits, phase),)
            for batch_size in axes[0]
            for query_len in axes[1]
            for num_blocks in axes[2]
        )

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the next size in every dimension, or the shape itself where there is none; O(log n)."""
        batches, queries, blocks = self._axes[shape.phase]
        batch_size = _next(batches, shape.batch_size)
        query_len = _next(queries, shape.query_len)
        num_blocks = _next(blocks, shape.num_blocks)
        if batch_size is None or query_len is None or num_blocks is None:
            return Bucket.of(shape)
        return Bucket(batch_size, query_len, num_blocks, shape.phase)

    def _sizes(self, limits: BucketLimits, phase: Phase) -> tuple[list[int], list[int], list[int]]:
        """Return the sizes of batch, query and blocks, each ascending."""
        most_blocks = limits.max_blocks_per_sequence
        if phase is Phase.PREFILL:
            longest = min(limits.max_num_batched_tokens, limits.max_model_len)
            queries = list(fibonacci_sizes(longest, smallest=min(self._smallest_query, longest)))
            return [1], queries, [0, *fibonacci_sizes(most_blocks)]
        sequences = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        blocks = limits.num_blocks if limits.contiguous else limits.max_num_seqs * most_blocks
        queries = [1, 1 + limits.max_draft_tokens] if limits.max_draft_tokens else [1]
        return list(fibonacci_sizes(sequences)), queries, list(fibonacci_sizes(blocks))


def fibonacci_sizes(largest: int, *, smallest: int = 1) -> Iterator[int]:
    """Yield the Fibonacci numbers from ``smallest`` up to ``largest``, and ``largest`` itself. Pure.

    Args:
        largest: At least 1.
        smallest: At most ``largest``; yielded itself if it is no Fibonacci number.
    """
    size, following = 1, 2
    if smallest > 1:
        while following <= smallest:
            size, following = following, size + following
        yield smallest
        size, following = following, size + following
    while size < largest:
        yield size
        size, following = following, size + following
    if smallest < largest or smallest == 1:
        yield largest


def _next(sizes: list[int], size: int) -> int | None:
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
