"""Fallbacks: a bucket for a shape that no prepared one covers.

sizes ─ round up, so that a few buckets serve many shapes ─ cap at the largest legal size ─ keep the token budget ─▶ bucket
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_plugins.bucketing.prompt_rules import PromptRules

__all__ = ["Sizes", "fallback_bucket", "fallback_size", "max_decode_blocks"]

Sizes = tuple[int, int, int]
"""Batch size, query length and blocks."""

_NO_RULES = PromptRules()


def fallback_bucket(
    shape: Shape,
    limits: BucketLimits,
    *,
    rules: PromptRules = _NO_RULES,
    rounding: Callable[[Shape], Sizes] | None = None,
) -> Bucket:
    """Return a bucket that covers ``shape``, for when no prepared one does. Pure.

    Sizes are rounded up, so that a few buckets serve many shapes, and capped at the largest legal size, but never below the
    request. Where rounding would exceed the token budget that memory was measured for, and the request does not, the query
    length stays as asked for, or else the batch size, or else both.

    Args:
        shape: Shape that needs a bucket.
        limits: Limits of a shape; of a unified shape, they are all that counts.
        rules: Rules for query lengths of prefill passes; where they ask for it, longer than the longest legal one.
        rounding: Rounds sizes up; by default with :func:`fallback_size`.

    Source: vllm-gaudi, extension/bucketing/common.py, without its two defects: it may return less than was asked for,
    and more tokens than the budget.
    """
    if isinstance(shape, UnifiedShape):
        return _unified_fallback(shape, limits)
    is_prefill = shape.phase is Phase.PREFILL
    allowed = rules.rounded if is_prefill else int
    rounded = _cube_rooted(shape, rules) if rounding is None else rounding(shape)
    caps, least = _largest(limits, shape.phase), (shape.batch_size, allowed(shape.query_len), shape.num_blocks)
    batch_size, query_len, num_blocks = (_capped(*sizes) for sizes in zip(rounded, caps, least, strict=True))
    query_len = allowed(query_len)
    budget = max(limits.max_num_batched_tokens, shape.batch_size * least[1])
    if batch_size * query_len > budget:
        if batch_size * least[1] <= budget:
            query_len = least[1]
        else:
            batch_size = shape.batch_size
            query_len = query_len if batch_size * query_len <= budget else least[1]
    return Bucket(batch_size, query_len, num_blocks, shape.phase)


def _largest(limits: BucketLimits, phase: Phase) -> Sizes:
    if phase is Phase.PREFILL:
        return limits.max_prefill_batch_size, limits.max_prefill_query_len, limits.max_context_blocks
    return limits.max_num_seqs, 1 + limits.max_draft_tokens, max_decode_blocks(limits)


def _cube_rooted(shape: Shape, rules: PromptRules) -> Sizes:
    is_prefill = shape.phase is Phase.PREFILL
    # One token is a chunk before it is rounded: its bucket must serve as many tokens as it holds.
    query_len = rules.in_chunks([1])[0] if is_prefill and shape.query_len == 1 else shape.query_len
    is_sliced = is_prefill and rules.slice_queries and shape.query_len >= rules.slice_threshold
    return (
        fallback_size(shape.batch_size, base=2),
        # A slice is coarse enough.
        shape.query_len if is_sliced else fallback_size(query_len, base=rules.fallback_base),
        fallback_size(shape.num_blocks, base=32),
    )


def _unified_fallback(shape: UnifiedShape, limits: BucketLimits) -> UnifiedBucket:
    max_tokens = limits.max_num_batched_tokens
    if not shape.is_causal:
        max_tokens = min(max_tokens, limits.max_num_seqs)
    return UnifiedBucket(
        _capped(fallback_size(shape.query_len, base=32), max_tokens, shape.query_len),
        _capped(fallback_size(shape.num_blocks, base=32), limits.max_shared_blocks, shape.num_blocks),
        _capped(fallback_size(shape.num_unique_blocks, base=32), limits.num_blocks, shape.num_unique_blocks),
        shape.is_causal,
    )


def fallback_size(size: int, *, base: int) -> int:
    """Return ``size`` rounded up to a multiple of ``ceil(cbrt(size)) · base``: coarser as sizes grow. Pure.

    0 and 1 stay. So does a size that is itself the result of rounding: else the bucket made for a shape would not serve
    a shape of its own size.

    Source: vllm-gaudi, extension/bucketing/common.py.
    """
    if size <= 1 or _is_fallback_size(size, base):
        return size
    step = _ceil_cbrt(size) * base
    return -(-size // step) * step


def _is_fallback_size(size: int, base: int) -> bool:
    """Whether a size of root³ or less, but above ``size - root · base``, is rounded to ``size``, for any root."""
    root = _ceil_cbrt(size)
    while root > 1 and root**3 > size - root * base:
        if size % (root * base) == 0:
            return True
        root -= 1
    return False


def _ceil_cbrt(size: int) -> int:
    root = round(math.cbrt(size))
    return root if root**3 >= size else root + 1


def _capped(size: int, cap: int, least: int) -> int:
    return max(least, min(size, cap))


def max_decode_blocks(limits: BucketLimits) -> int:
    """Return the most blocks a legal decode pass reads: a range of the cache, or every sequence's longest table. Pure."""
    if limits.contiguous:
        return limits.num_blocks
    return limits.max_num_seqs * limits.max_blocks_per_sequence
