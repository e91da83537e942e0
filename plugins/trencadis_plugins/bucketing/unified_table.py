"""Tables for unified attention, where one pass holds prefills and decodes: four dimensions, and pure functions of limits.

    query_len       tokens of all sequences together
    shared_blocks   blocks that several sequences read, once for all
    unique_blocks   blocks that one sequence reads
    is_causal       some of the tokens attend to each other: the pass holds a prefill

No pass of the engine has such a shape yet, see docs/decisions/0010. What a form makes of one dimension serves the shapes that
there are, in ``unified.py``.
Source: vllm-gaudi, 2025-09-26 (alpha) and v0.11.2 (exponential), extension/bucketing/unified.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import attrs

from trencadis.records import BucketLimits

__all__ = ["UnifiedBucket", "alpha_points", "exponential_points", "unified_buckets"]

_NUM_POINTS = 10


@attrs.frozen(order=True)
class UnifiedBucket:
    """A static shape of a unified pass.

    Attributes:
        query_len: Tokens of all sequences together.
        shared_blocks: KV blocks that several sequences read.
        unique_blocks: KV blocks that one sequence reads.
        is_causal: The pass holds a prefill.
    """

    query_len: int
    shared_blocks: int
    unique_blocks: int
    is_causal: bool


def unified_buckets(limits: BucketLimits, form: str) -> tuple[UnifiedBucket, ...]:
    """Return the unified buckets over all combinations that a pass can need, sorted. Pure.

    Args:
        limits: What bounds a pass.
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
        query_len, shared, unique = bucket.query_len, bucket.shared_blocks, bucket.unique_blocks
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
