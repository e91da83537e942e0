"""Sizes that grow by a constant factor.

Source: vllm-gaudi, extension/bucketing/exponential.py, rules of 2026; the rules of July 2025 are in ``filled.py``.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import NamedTuple

from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_plugins.bucketing.fallback import fallback_bucket
from trencadis_plugins.bucketing.filled import fill_range, filled_decode_buckets, filled_prefill_buckets, filled_sizes
from trencadis_plugins.bucketing.generate import LONG_MODEL_LEN, decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest

__all__ = ["Exponential", "exponential_range"]


_log = logging.getLogger("trencadis.bucketing")


class _Range(NamedTuple):
    """Arguments of :func:`exponential_range`."""

    minimum: int
    step: int
    maximum: int
    limit: int


class Exponential(TableStrategy):
    """About log2(largest) sizes in each dimension, so warm-up stays short over a wide range. Immutable.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: How many sizes a dimension has, and whose rules make them.
    """

    def __init__(self, limits: BucketLimits, config: ExponentialConfig | None = None) -> None:
        self._config = config if config is not None else ExponentialConfig()
        self._config.prompts.check(limits, "bucketing.exponential")
        if not limits.unified:
            self._log_ranges(limits)
        super().__init__(limits, self._config.prompts)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure."""
        prefill = self._filled_prefill(limits) if self._fills else self._prefill(limits)
        decode = self._filled_decode(limits) if self._fills else self._decode(limits)
        rules = self._config.prompts
        return or_largest(prefill, limits, Phase.PREFILL, rules=rules) + or_largest(decode, limits, Phase.DECODE)

    def fallback(self, shape: Shape) -> Bucket:
        """Return a bucket that covers ``shape``, made for it by the generation's rules. Pure."""
        if self._fills:
            return fallback_bucket(
                shape, self._limits, rounding=partial(filled_sizes, block_size=self._limits.block_size)
            )
        return super().fallback(shape)

    @property
    def _fills(self) -> bool:
        return self._config.generation == "2025-07"

    def _log_ranges(self, limits: BucketLimits) -> None:
        what = "bucket config (min, step, max_warmup, limit)"
        if self._fills:
            _log.info("Prompt %s bs:%s, seq:%s", what, *map(list, self._filled_prefill_ranges(limits)))
            _log.info("Decode %s bs:%s, block:%s", what, *map(list, self._filled_decode_ranges(limits)))
            return
        _log.info("Prompt %s bs:%s, query:%s, blocks:%s", what, *map(list, self._prefill_ranges(limits)))
        _log.info("Decode %s bs:%s, block:%s", what, *map(list, self._decode_ranges(limits)))

    def _prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        batch_sizes, query_lens, context_blocks = (
            exponential_range(*dimension) for dimension in self._prefill_ranges(limits)
        )
        max_edge = self._config.prompt_ctx_max
        return prefill_buckets(
            limits,
            batch_sizes=batch_sizes,
            query_lens=query_lens,
            context_blocks=context_blocks,
            max_edge=max_edge if max_edge >= 0 else None,
            rules=self._config.prompts,
        )

    def _decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        batch_sizes, num_blocks = (exponential_range(*dimension) for dimension in self._decode_ranges(limits))
        return decode_buckets(
            limits, batch_sizes=batch_sizes, num_blocks=num_blocks, flat_drafts=self._config.flat_drafts
        )

    def _prefill_ranges(self, limits: BucketLimits) -> tuple[_Range, _Range, _Range]:
        """Return the ranges of batch sizes, query lengths and context blocks."""
        config, block_size, prompts = self._config, limits.block_size, limits.max_merged_prefills
        # What counts several prompts together has wider steps.
        query_step, context_step = (block_size, 1) if prompts == 1 else (4 * block_size, 4)
        max_batch, max_query = limits.max_prefill_batch_size, limits.max_num_batched_tokens
        min_query = 1 if config.single_token_prompts else block_size
        if limits.max_model_len >= LONG_MODEL_LEN:
            max_context = max(1, (limits.max_model_len - max_query) // block_size)
        else:
            max_context = max(1, (limits.max_model_len - min_query) // block_size)
        derived_contexts = 2 if max_context == 1 else _ceil_log2(max_context) + 1
        bs_limit = self._limit(config.prompt_bs_limit, derived=_ceil_log2(max_batch) + 1)
        query_limit = self._limit(config.prompt_query_limit, derived=max(1, _ceil_log2(max_query)))
        ctx_limit = self._limit(config.prompt_ctx_limit, derived=derived_contexts)
        return (
            _Range(1, 2, max_batch, bs_limit),
            _Range(min_query, query_step, max_query, query_limit),
            _Range(0, context_step, prompts * max_context, ctx_limit),
        )

    def _decode_ranges(self, limits: BucketLimits) -> tuple[_Range, _Range]:
        """Return the ranges of batch sizes and of blocks."""
        config, max_batch = self._config, limits.max_num_seqs
        max_blocks, derived = self._decode_blocks(limits)
        bs_limit = self._limit(config.decode_bs_limit, derived=_ceil_log2(max_batch) + 1)
        block_limit = self._limit(config.decode_block_limit, derived=derived)
        return _Range(1, 2, max_batch, bs_limit), _Range(1, max_batch, max_blocks, block_limit)

    def _decode_blocks(self, limits: BucketLimits) -> tuple[int, int]:
        """Return the largest count of blocks, and how many counts there are."""
        most = limits.max_blocks_per_sequence * limits.max_num_seqs
        if limits.contiguous:
            most = min(most, limits.num_blocks)
            return most, _ceil_log2(most) + 1
        # Shared prefixes let sequences read more blocks than there are; three times is enough.
        readable = 3 * limits.num_blocks
        if self._config.clamp_decode_blocks:
            most = min(most, readable)
        # Beyond that the same number of counts would lie thinner: add one for each doubling.
        extra = _ceil_log2(-(-most // readable)) + 1 if most > readable else 0
        return most, _ceil_log2(most) + 1 + extra

    def _filled_prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        batch_sizes, query_lens = (fill_range(*dimension) for dimension in self._filled_prefill_ranges(limits))
        return filled_prefill_buckets(limits, batch_sizes=batch_sizes, query_lens=query_lens)

    def _filled_decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        batches, blocks = self._filled_decode_ranges(limits)
        return filled_decode_buckets(
            limits,
            batch_sizes=fill_range(*batches),
            num_blocks=fill_range(*blocks, exact_end=limits.contiguous),
            flat_drafts=self._config.flat_drafts,
        )

    def _filled_prefill_ranges(self, limits: BucketLimits) -> tuple[_Range, _Range]:
        """Return the ranges of batch sizes and query lengths."""
        config, most, longest = self._config, limits.max_prefill_batch_size, limits.max_model_len
        return (
            _Range(1, 1, most, self._limit(config.prompt_bs_limit, derived=_ceil_log2(most) + 1)),
            _Range(
                limits.block_size,
                limits.block_size,
                longest,
                self._limit(config.prompt_query_limit, derived=_ceil_log2(longest) + 1),
            ),
        )

    def _filled_decode_ranges(self, limits: BucketLimits) -> tuple[_Range, _Range]:
        """Return the ranges of batch sizes and of blocks, whose step is the block size, read as a count."""
        config, most, step = self._config, limits.max_num_seqs, limits.block_size
        block_limit = self._limit(config.decode_block_limit, derived=_ceil_log2(limits.num_blocks) + 1)
        return (
            _Range(1, 1, most, self._limit(config.decode_bs_limit, derived=_ceil_log2(most) + 1)),
            _Range(step, step, limits.num_blocks, block_limit),
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
