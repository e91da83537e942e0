"""Sizes that grow by a constant factor.

Source: vllm-gaudi, extension/bucketing/exponential.py, rules of 2026.
"""

from __future__ import annotations

import math

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_plugins.bucketing.generate import LONG_MODEL_LEN, decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.table import BucketTable, fallback_bucket

__all__ = ["Exponential", "exponential_range"]


class Exponential(BucketingStrategy):
    """About log2(largest) sizes in each dimension, so warm-up stays short over a wide range. Immutable.

    Args:
        limits: What ``bucket_for`` works under.
        config: How many sizes a dimension has.
    """

    def __init__(self, limits: BucketLimits, config: ExponentialConfig | None = None) -> None:
        self._config = config if config is not None else ExponentialConfig()
        self._limits = limits
        self._table = BucketTable(self.buckets(limits))

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure."""
        return self._prefill(limits) + self._decode(limits)

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the prepared bucket of least ``padded_cost`` that covers ``shape``, or a fallback. Pure."""
        return self._table.find(shape) or fallback_bucket(shape, self._limits)

    def _prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config, block_size = self._config, limits.block_size
        max_batch, max_query = limits.max_prefill_batch_size, limits.max_num_batched_tokens
        if limits.max_model_len >= LONG_MODEL_LEN:
            max_context = max(1, (limits.max_model_len - max_query) // block_size)
        else:
            max_context = max(1, (limits.max_model_len - block_size) // block_size)
        derived_contexts = 2 if max_context == 1 else _ceil_log2(max_context) + 1
        bs_limit = self._limit(config.prompt_bs_limit, derived=_ceil_log2(max_batch) + 1)
        query_limit = self._limit(config.prompt_query_limit, derived=max(1, _ceil_log2(max_query)))
        ctx_limit = self._limit(config.prompt_ctx_limit, derived=derived_contexts)
        return prefill_buckets(
            limits,
            batch_sizes=exponential_range(1, 2, max_batch, bs_limit),
            query_lens=exponential_range(block_size, block_size, max_query, query_limit),
            context_blocks=exponential_range(0, 1, max_context, ctx_limit),
        )

    def _decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config, max_batch = self._config, limits.max_num_seqs
        # Without contiguous blocks, shared prefixes let sequences read more blocks than there are; three times is enough.
        max_readable = limits.num_blocks if limits.contiguous else 3 * limits.num_blocks
        max_blocks = min(limits.max_blocks_per_sequence * max_batch, max_readable)
        bs_limit = self._limit(config.decode_bs_limit, derived=_ceil_log2(max_batch) + 1)
        block_limit = self._limit(config.decode_block_limit, derived=_ceil_log2(max_blocks) + 1)
        return decode_buckets(
            limits,
            batch_sizes=exponential_range(1, 2, max_batch, bs_limit),
            num_blocks=exponential_range(1, max_batch, max_blocks, block_limit),
        )

    def _limit(self, own: int, *, derived: int) -> int:
        return own or self._config.limit or derived


def exponential_range(minimum: int, step: int, maximum: int, limit: int) -> list[int]:
    """Return at most ``limit`` sizes from ``minimum`` to ``maximum`` in geometric progression, ascending. Pure.

    The sizes are ``minimum · (maximum / minimum) ** (i / (limit - 1))``, rounded up to multiples of ``step`` and capped
    at ``maximum``. A minimum of 0 or 1 is kept beside a progression that starts at ``step``.

    Args:
        minimum: Smallest size, at least 0.
        step: Sizes are multiples of it, at least 1.
        maximum: Largest size, at least 1.
        limit: Number of sizes before duplicates are dropped; 1 leaves ``maximum`` alone.

    Raises:
        ValueError: ``limit`` is below 1.
    """
    if limit < 1:
        raise ValueError(f"a range of {limit} sizes from {minimum} to {maximum}: limit must be at least 1")
    if limit == 1:
        return [maximum]
    start = step if minimum in (0, 1) else minimum
    sizes = {minimum} if minimum in (0, 1) else set()
    for i in range(limit):
        # This order of operations is part of the definition: another one rounds some sizes to the next step.
        size = start * (maximum / start) ** ((1 / (limit - 1)) * i)
        sizes.add(min(maximum, math.ceil(size / step) * step))
    return sorted(sizes)


def _ceil_log2(value: int) -> int:
    return (value - 1).bit_length()
