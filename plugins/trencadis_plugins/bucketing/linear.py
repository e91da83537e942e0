"""Powers of two up to a step, then multiples of the step.

Source: vllm-gaudi, extension/bucketing/linear.py, rules of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.records import BucketLimits
from trencadis_plugins.bucketing.config import LinearConfig
from trencadis_plugins.bucketing.stepped import Span, SteppedStrategy

__all__ = ["Linear", "linear_range"]


class Linear(SteppedStrategy[LinearConfig]):
    """Padding bounded by a step, at the price of many buckets: large limits want a maximum set by hand. Immutable.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: Smallest size, step and largest size of each dimension.

    Raises:
        ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
    """

    table_name = "bucketing.linear"

    def __init__(self, limits: BucketLimits, config: LinearConfig | None = None) -> None:
        super().__init__(limits, config if config is not None else LinearConfig())

    def derived(self, limits: BucketLimits) -> Mapping[str, Span]:
        """Return the span of each dimension where the config sets nothing. Pure."""
        block_size, max_query = limits.block_size, limits.max_num_batched_tokens
        min_query = self.min_query(limits)
        max_context = limits.max_merged_prefills * max(1, (limits.max_model_len - min_query) // block_size)
        # The context of several prompts together has a wider step.
        context_step = 1 if limits.max_merged_prefills == 1 else 4
        # The step of block counts is the block size, read as a count.
        max_blocks = max(limits.max_model_len * limits.max_num_seqs // block_size, block_size)
        return {
            "prompt_bs": Span(1, 1, limits.max_prefill_batch_size),
            "prompt_query": Span(min_query, block_size, max_query),
            "prompt_ctx": Span(0, context_step, max_context),
            "decode_bs": Span(1, 32, limits.max_num_seqs),
            "decode_block": Span(1, block_size, limits.num_blocks if limits.contiguous else max_blocks),
        }

    def sizes(self, dimension: str, span: Span, limits: BucketLimits) -> list[int]:
        """Return the sizes of a dimension, ascending. Pure.

        Raises:
            ValueError: There is none.
        """
        return linear_range(span.minimum, span.step, span.maximum)


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
