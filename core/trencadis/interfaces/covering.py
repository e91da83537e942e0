"""Buckets for the legal shapes that a strategy's table leaves out; for the engine, and for plugins that run a padded model of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trencadis.records import Bucket, BucketLimits, Phase, Shape

__all__ = ["covering_buckets"]


def covering_buckets(
    bucket_for: Callable[[Shape], Bucket], table: Collection[Bucket], limits: BucketLimits
) -> tuple[Bucket, ...]:
    """Return at most one bucket of each phase: it covers every shape of a padded engine that no bucket of the table does.

    Of prefills, one sequence alone is meant: several run together only in a prepared bucket. Of decodes, those that read the cache
    three times over at most, which sequences do that share most of their blocks.

    Args:
        bucket_for: The strategy's; it prefers what is in its table.
        table: The strategy's table.
        limits: Limits of every shape; not unified.
    """
    prepared = set(table)
    missed = [shape for shape in _largest_shapes(limits) if bucket_for(shape) not in prepared]
    return tuple(
        Bucket(
            max(shape.batch_size for shape in of_phase),
            max(shape.query_len for shape in of_phase),
            max(shape.num_blocks for shape in of_phase),
            phase,
        )
        for phase in Phase
        if (of_phase := [shape for shape in missed if shape.phase is phase])
    )


def _largest_shapes(limits: BucketLimits) -> list[Shape]:
    """Return shapes such that each one a step can have is within one of them."""
    block_size = limits.block_size
    prefills = []
    for context_blocks in range(-(-(limits.max_model_len - 1) // block_size) + 1):
        # The last context block holds one token at least.
        computed = max(0, context_blocks - 1) * block_size + (context_blocks > 0)
        query_len = min(limits.max_num_batched_tokens, limits.max_model_len - computed)
        prefills.append(Shape(1, query_len, context_blocks))
    decodes = []
    for batch_size in range(1, limits.max_num_seqs + 1):
        if limits.contiguous:
            num_blocks = limits.num_blocks
        else:
            num_blocks = min(batch_size * limits.max_blocks_per_sequence, max(batch_size, 3 * limits.num_blocks))
        query_lens = {1, 1 + limits.max_draft_tokens}
        decodes += [Shape(batch_size, query_len, num_blocks, Phase.DECODE) for query_len in query_lens]
    return prefills + decodes
