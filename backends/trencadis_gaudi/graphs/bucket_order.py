"""Which buckets come first: those without which some shape has none, and those that stand for all."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.records import Bucket, UnifiedBucket

__all__ = ["representatives", "required_first"]


def representatives(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the smallest, a middling and the largest of some buckets, each once. Pure."""
    order = sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.num_blocks, bucket))
    return [order[index] for index in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def required_first(buckets: Sequence[Bucket]) -> tuple[list[Bucket], int]:
    """Return buckets with those in front that cover all others, then the largest; second, how many those in front are. Pure."""
    order = sorted(buckets, key=lambda bucket: (_size(bucket), bucket), reverse=True)
    front: list[Bucket] = []
    for bucket in order:
        if not any(_covers(larger, bucket) for larger in front):
            front.append(bucket)
    covering = set(front)
    return [*front, *(bucket for bucket in order if bucket not in covering)], len(front)


def _covers(larger: Bucket, smaller: Bucket) -> bool:
    """Whether whatever fits the smaller fits the larger. Larger ones come first, so none in front is covered by a later one."""
    if isinstance(smaller, UnifiedBucket) and isinstance(larger, UnifiedBucket):
        fits = larger.num_unique_blocks >= smaller.num_unique_blocks and larger.is_causal >= smaller.is_causal
    else:
        fits = larger.phase is smaller.phase
    sizes = ((larger.batch_size, smaller.batch_size), (larger.query_len, smaller.query_len))
    return fits and all(one >= other for one, other in (*sizes, (larger.num_blocks, smaller.num_blocks)))


def _size(bucket: Bucket) -> int:
    unique = bucket.num_unique_blocks if isinstance(bucket, UnifiedBucket) else 0
    return bucket.num_tokens + bucket.num_blocks + unique
