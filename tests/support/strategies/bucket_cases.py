"""A small engine that buckets are made for, and ways to look at a table."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.records import Bucket, BucketLimits, Phase

__all__ = ["SMALL", "fields", "of_phase"]

SMALL = BucketLimits(
    block_size=128,
    max_model_len=1024,
    max_num_seqs=4,
    max_num_batched_tokens=1024,
    max_prefill_batch_size=1,
    num_blocks=5781,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)


def of_phase(buckets: Iterable[Bucket], phase: Phase) -> list[Bucket]:
    """Return the buckets of a phase, in order. Pure."""
    return [bucket for bucket in buckets if bucket.phase is phase]


def fields(buckets: Iterable[Bucket]) -> list[tuple[int, int, int]]:
    """Return batch size, query length and blocks of each bucket. Pure."""
    return [(bucket.batch_size, bucket.query_len, bucket.num_blocks) for bucket in buckets]
