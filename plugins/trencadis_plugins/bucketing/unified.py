"""The sizes of unified attention: for backends that have it, and on the shapes of those that pad.

query_len           tokens of all sequences together
    num_blocks          shared blocks: several of the tokens read them
    num_unique_blocks   from the first block of the cache up to the last that one token reads
    is_causal           some of the tokens attend to each other: the pass holds a prefill

Source: vllm-gaudi, 2025-09-26 (alpha) and v0.11.2 (exponential), extension/bucketing/unified.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from trencadis.records import Bucket, BucketLimits, Phase, UnifiedBucket
from trencadis_plugins.bucketing.config import UnifiedConfig
from trencadis_plugins.bucketing.fallback import max_decode_blocks
from trencadis_plugins.bucketing.generate import decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest

__all__ = ["Unified", "alpha_points", "exponential_points", "prepared_buckets", "unified_buckets"]


_NUM_POINTS = 10


def unified_buckets(limits: BucketLimits, form: str) -> tuple[UnifiedBucket, ...]:
    """Return the unified buckets over all combinations that a pass can need, sorted. Pure.

    Args:
        limits: Limits of a pass.
        form: ``alpha`` or ``exponential``.
    """
    seqs, blocks_each = limits.max_num_seqs, limits.max_model_len // limits.block_size
    if form == "alpha":
        query_lens = alpha_points(limits.max_num_batched_tokens, seqs)
        shared = {0} | alpha_points(blocks_each * seqs, seqs)
        unique = {0} | alpha_points(limits.num_blocks, seqs)
    else:
        query_lens = exponential_points(limits.max_num_batched_tokens, seqs)
        shared = {0} | exponential_points(min(blocks_each, limits.num_blocks), seqs)
        unique = {0} | exponential_points(limits.num_blocks, seqs)
    candidates = (UnifiedBucket(*sizes) for sizes in product(query_lens, shared, unique, (False, True)))
    return tuple(sorted(_needed(candidates, limits, form)))


def prepared_buckets(limits: BucketLimits, form: str) -> tuple[UnifiedBucket, ...]:
    """Return what an engine prepares: the form's buckets, cut to what a pass can need, and the largest. Pure.

    A form rounds some sizes up beyond the limits, and its largest bucket may miss the largest pass: of the exponential form
    that has as many shared blocks as one sequence. A shared block has two readers at least, so sequences with one token each
    share no more blocks than half of them have. Causal buckets come first, as prefills do elsewhere.

    Args:
        limits: Limits of a pass.
        form: ``alpha`` or ``exponential``.
    """
    found = {_cut(bucket, limits) for bucket in unified_buckets(limits, form)}
    tops = (
        UnifiedBucket(limits.max_num_batched_tokens, limits.num_blocks, limits.num_blocks, flag)
        for flag in (True, False)
    )
    found.update(_cut(bucket, limits) for bucket in tops)
    return tuple(sorted(found, key=lambda bucket: (not bucket.is_causal, bucket)))


def _cut(bucket: UnifiedBucket, limits: BucketLimits) -> UnifiedBucket:
    query_len, shared = min(bucket.query_len, limits.max_num_batched_tokens), limits.max_shared_blocks
    if not bucket.is_causal:
        query_len = min(query_len, limits.max_num_seqs)
        shared = min(shared, query_len // 2 * limits.max_blocks_per_sequence)
    return UnifiedBucket(
        query_len,
        min(bucket.num_blocks, shared),
        min(bucket.num_unique_blocks, limits.num_blocks),
        bucket.is_causal,
    )


def alpha_points(maximum: int, max_num_seqs: int) -> set[int]:
    """Return a quarter, a half and the whole of a dimension's maximum and of the sequences, without 0. Pure."""
    return {size for most in (maximum, max_num_seqs) for size in (most // 4, most // 2, most)} - {0}


def exponential_points(maximum: int, max_num_seqs: int) -> set[int]:
    """Return sizes from 1 to ``maximum`` in geometric progression, rounded up to multiples of ``max_num_seqs``. Pure.

    The last is ``maximum`` itself, even where others were rounded beyond it. Empty if ``maximum`` is 0.
    """
    if maximum < 1:
        return set()
    sizes = {maximum}
    for i in range(_NUM_POINTS - 1):
        # The order of operations is part of the definition, as in the exponential range.
        size = maximum ** ((1 / (_NUM_POINTS - 1)) * i)
        sizes.add(math.ceil(size / max_num_seqs) * max_num_seqs)
    return sizes


def _needed(candidates: Iterator[UnifiedBucket], limits: BucketLimits, form: str) -> Iterator[UnifiedBucket]:
    """Yield what a pass can need: shared blocks are read by two sequences at least, and fit their length."""
    max_num_seqs, max_model_len = limits.max_num_seqs, limits.max_model_len
    for bucket in candidates:
        query_len, shared, unique = bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks
        shared_tokens = shared * limits.block_size
        if bucket.is_causal:
            if shared_tokens // min(max_num_seqs, query_len) <= max_model_len:
                yield bucket
            continue
        shares = not shared or (query_len > 1 and shared_tokens // (query_len // 2) <= max_model_len)
        # The exponential form also leaves out passes without shared blocks that have fewer blocks than sequences.
        enough = bool(shared or unique) if form == "alpha" else bool(shared) or query_len <= unique
        if query_len <= max_num_seqs and shares and enough:
            yield bucket


class Unified(TableStrategy):
    """Few sizes, tied to the number of sequences. Immutable.

    Where one pass holds prefills and decodes, the form's table, with the largest pass in it. Else the form's sizes in each
    dimension of prefill and decode passes.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: Which form.
    """

    def __init__(self, limits: BucketLimits, config: UnifiedConfig | None = None) -> None:
        self._config = config if config is not None else UnifiedConfig()
        super().__init__(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill (or causal) buckets, then decode (or other) buckets. Pure."""
        if limits.unified:
            return prepared_buckets(limits, self._config.form)
        prefill = prefill_buckets(
            limits,
            # The largest batch alone would leave a long prompt without a bucket: several of its length exceed the budget.
            batch_sizes=sorted({1, *self._points(limits.max_prefill_batch_size, limits)}),
            query_lens=self._points(limits.max_prefill_query_len, limits),
            context_blocks=[0, *self._points(limits.max_context_blocks, limits)],
        )
        decode = decode_buckets(
            limits,
            batch_sizes=self._points(limits.max_num_seqs, limits),
            num_blocks=self._points(max_decode_blocks(limits), limits),
            flat_drafts=self._config.flat_drafts,
        )
        return or_largest(prefill, limits, Phase.PREFILL) + or_largest(decode, limits, Phase.DECODE)

    def _points(self, maximum: int, limits: BucketLimits) -> list[int]:
        points = alpha_points if self._config.form == "alpha" else exponential_points
        return sorted(size for size in points(maximum, limits.max_num_seqs) if size <= maximum)
