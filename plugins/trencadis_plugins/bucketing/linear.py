"""Powers of two up to a step, then multiples of the step.

Source: vllm-gaudi, extension/bucketing/linear.py, rules of 2026.
"""

from __future__ import annotations

import logging

from trencadis.errors import ConfigValueError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Shape
from trencadis_plugins.bucketing.config import LinearConfig
from trencadis_plugins.bucketing.generate import decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.table import BucketTable, fallback_bucket

__all__ = ["Linear", "linear_range"]

_log = logging.getLogger(__name__)


class Linear(BucketingStrategy):
    """Padding bounded by a step, at the price of many buckets: large limits want a maximum set by hand. Immutable.

    Args:
        limits: What ``bucket_for`` works under.
        config: Smallest size, step and largest size of each dimension.

    Raises:
        ConfigValueError: A smallest size is above the largest one.
    """

    def __init__(self, limits: BucketLimits, config: LinearConfig | None = None) -> None:
        self._config = config if config is not None else LinearConfig()
        self._limits = limits
        self._table = BucketTable(self.buckets(limits))

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure.

        Raises:
            ConfigValueError: A smallest size is above the largest one.
        """
        return self._prefill(limits) + self._decode(limits)

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the prepared bucket of least ``padded_cost`` that covers ``shape``, or a fallback. Pure."""
        return self._table.find(shape) or fallback_bucket(shape, self._limits)

    def _prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config, block_size = self._config, limits.block_size
        max_query = _at_most(config.prompt_query_max, limits.max_num_batched_tokens)
        min_query = config.prompt_query_min or min(block_size, max_query)
        derived_context = max(1, (limits.max_model_len - min_query) // block_size)
        max_context = min(config.prompt_ctx_max, -(-(limits.max_model_len - 1) // block_size))
        if config.prompt_ctx_max < 0:
            max_context = derived_context
        max_batch = _at_most(config.prompt_bs_max, limits.max_prefill_batch_size)
        return prefill_buckets(
            limits,
            batch_sizes=_range("prompt_bs", config.prompt_bs_min or 1, config.prompt_bs_step or 1, max_batch),
            query_lens=_range("prompt_query", min_query, config.prompt_query_step or block_size, max_query),
            context_blocks=_range("prompt_ctx", config.prompt_ctx_min, config.prompt_ctx_step or 1, max_context),
            max_edge=config.prompt_ctx_max if config.prompt_ctx_max >= 0 else None,
        )

    def _decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config = self._config
        max_batch = _at_most(config.decode_bs_max, limits.max_num_seqs)
        min_blocks, step = config.decode_block_min or 1, config.decode_block_step or limits.block_size
        if limits.contiguous:
            max_blocks = _at_most(config.decode_block_max, limits.num_blocks)
            if min_blocks > max_blocks:
                lowered = max(1, max_blocks - step)
                _log.info("[bucketing.linear] decode_block_min = %d: above %d, so %d", min_blocks, max_blocks, lowered)
                min_blocks = lowered
        else:
            derived = max(limits.max_model_len * limits.max_num_seqs // limits.block_size, limits.block_size)
            max_blocks = _at_most(config.decode_block_max, derived)
        return decode_buckets(
            limits,
            batch_sizes=_range("decode_bs", config.decode_bs_min or 1, config.decode_bs_step or 32, max_batch),
            num_blocks=_range("decode_block", min_blocks, step, max_blocks),
        )


def linear_range(minimum: int, step: int, maximum: int) -> list[int]:
    """Return the sizes from ``minimum`` to ``maximum``, ascending. Pure.

    ``minimum`` doubles while it is below ``step``; multiples of ``step`` follow. ``maximum`` itself is among them only if
    it is such a multiple. A minimum of 0 is kept beside sizes that start at ``step``.

    Args:
        minimum: Smallest size, at least 0.
        step: At least 1.
        maximum: No size is above it.

    Raises:
        ValueError: No size is left: ``minimum`` is above ``maximum``, or above its last multiple of ``step``.
    """
    start = minimum or step
    sizes = set() if minimum else {0}
    size = start
    while size < step and size <= maximum:
        sizes.add(size)
        size *= 2
    sizes.update(size for size in range(step, maximum + 1, step) if size >= start)
    if not sizes:
        raise ValueError(f"no size from {minimum} to {maximum} in steps of {step}")
    return sorted(sizes)


def _range(dimension: str, minimum: int, step: int, maximum: int) -> list[int]:
    try:
        return linear_range(minimum, step, maximum)
    except ValueError as error:
        raise ConfigValueError(
            f"[bucketing.linear] {dimension}_min = {minimum}: {error}.",
            hint=f"Lower {dimension}_min, raise {dimension}_max, or raise the engine's limit that caps it.",
        ) from error


def _at_most(wanted: int, limit: int) -> int:
    """The wanted maximum, or the limit if nothing is wanted or too much is."""
    return min(wanted, limit) if wanted else limit
