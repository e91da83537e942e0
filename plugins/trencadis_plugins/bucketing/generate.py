"""From the sizes of each dimension to a table of buckets: product, filters, correctors; the same for every strategy.

Names of the formulas: P most sequences of a prefill pass, S most sequences, C context blocks, M decode blocks.
Source: vllm-gaudi, extension/bucketing/exponential.py and linear.py, rules of 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trencadis.records import Bucket, BucketLimits, Phase

__all__ = ["LONG_MODEL_LEN", "decode_buckets", "prefill_buckets"]

LONG_MODEL_LEN = 8192
"""From this ``max_model_len`` on, the largest context of a query length is what the query leaves of the model length."""


def prefill_buckets(
    limits: BucketLimits,
    *,
    batch_sizes: Sequence[int],
    query_lens: Sequence[int],
    context_blocks: Sequence[int],
    max_edge: int | None = None,
) -> tuple[Bucket, ...]:
    """Return the prefill buckets over all combinations that a legal step can need, sorted. Pure.

    Combinations above the token budget or the model length are left out. If that leaves nothing, one bucket for the
    longest query without context stays.

    Args:
        limits: What bounds a shape.
        batch_sizes: Ascending.
        query_lens: Tokens, ascending.
        context_blocks: Blocks per sequence, ascending.
        max_edge: The largest context follows the query length only where that stays below this many blocks.
    """
    largest_context = context_blocks[-1]
    max_context = -(-(limits.max_model_len - 1) // limits.block_size)
    found = set()
    for batch_size in batch_sizes:
        edge = largest_context
        for query_len in query_lens:
            left = (limits.max_model_len - query_len) // limits.block_size
            if limits.max_model_len >= LONG_MODEL_LEN and left >= 0 and (max_edge is None or left < max_edge):
                edge = left
            for context in (*context_blocks[:-1], edge):
                if (
                    context <= max_context
                    and query_len <= limits.max_model_len
                    and batch_size * query_len <= limits.max_num_batched_tokens
                ):
                    found.add(Bucket(batch_size, query_len, context, Phase.PREFILL))
    if not found:
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        found.add(Bucket(1, longest, 0, Phase.PREFILL))
    return tuple(sorted(found))


def decode_buckets(
    limits: BucketLimits, *, batch_sizes: Sequence[int], num_blocks: Iterable[int]
) -> tuple[Bucket, ...]:
    """Return the decode buckets over all combinations that a legal step can need, sorted. Pure.

    With contiguous blocks a range over the whole cache is added. Otherwise every sequence reads at least one block, so
    that smaller combinations are left out, and at most its longest table, so that larger ones are cut. With drafts,
    every bucket exists for one token and for ``1 + max_draft_tokens``.

    Args:
        limits: What bounds a shape.
        batch_sizes: Ascending.
        num_blocks: Blocks of all sequences together.
    """
    blocks = set(num_blocks)
    if limits.contiguous:
        blocks.add(limits.num_blocks)
        pairs = {(batch_size, count) for batch_size in batch_sizes for count in blocks}
    else:
        pairs = {
            (batch_size, min(count, batch_size * limits.max_blocks_per_sequence))
            for batch_size in batch_sizes
            for count in blocks
            if batch_size <= count
        }
    query_lens = {1, 1 + limits.max_draft_tokens}
    return tuple(
        sorted(
            Bucket(batch_size, query_len, count, Phase.DECODE)
            for batch_size, count in pairs
            for query_len in query_lens
        )
    )
