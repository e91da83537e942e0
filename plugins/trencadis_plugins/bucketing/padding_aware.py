"""Multiples of a step, thinned out as far as the padding stays within bounds.

Source: vllm-gaudi, extension/bucketing/padding_aware.py, rules of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.records import BucketLimits
from trencadis_plugins.bucketing.config import PaddingAwareConfig
from trencadis_plugins.bucketing.stepped import Span, SteppedStrategy

__all__ = ["PaddingAware", "padding_aware_range"]


class PaddingAware(SteppedStrategy[PaddingAwareConfig]):
    """Padding bounded by a share of a size and by a number: between ``exponential`` and ``linear``. Immutable.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: Smallest size, step, largest size and most padding of each dimension.

    Raises:
        ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
    """

    table_name = "bucketing.padding_aware"
    logged_numbers = "min, step, max_warmup, pad_max, pad_percent"
    caps_least_blocks = True

    def __init__(self, limits: BucketLimits, config: PaddingAwareConfig | None = None) -> None:
        super().__init__(limits, config if config is not None else PaddingAwareConfig())

    def derived(self, limits: BucketLimits) -> Mapping[str, Span]:
        """Return the span of each dimension where the config sets nothing. Pure."""
        block_size, max_query = limits.block_size, limits.max_num_batched_tokens
        min_query = self.min_query(limits)
        # The step of block counts is the block size, read as a count.
        max_blocks = max(-(-limits.max_model_len * limits.max_num_seqs // block_size), block_size)
        max_context = max(0, -(-(limits.max_model_len - min_query) // block_size))
        # The context of several prompts together has a wider step.
        context_step = 2 if limits.max_merged_prefills == 1 else 4
        return {
            "prompt_bs": Span(1, 1, limits.max_prefill_batch_size),
            "prompt_query": Span(min_query, block_size, max_query),
            "prompt_ctx": Span(0, context_step, limits.max_merged_prefills * max_context),
            "decode_bs": Span(1, 2, limits.max_num_seqs),
            "decode_block": Span(block_size, block_size, limits.num_blocks if limits.contiguous else max_blocks),
        }

    def sizes(self, dimension: str, span: Span, limits: BucketLimits) -> list[int]:
        """Return the sizes of a dimension, ascending. Pure.

        Raises:
            ValueError: There is none.
        """
        return padding_aware_range(*self.numbers(dimension, span, limits))

    def numbers(self, dimension: str, span: Span, limits: BucketLimits) -> tuple[int, int, int, int, int]:
        """Return the span's, the most padding and its most in percent of a size. Pure."""
        max_padding, max_percent = (getattr(self._config, f"{dimension}_{name}") for name in ("pad_max", "pad_percent"))
        if max_padding < 0:
            budget_blocks = -(-limits.max_num_batched_tokens // limits.block_size)
            quarter = -(-self.derived(limits)[dimension].maximum // 4)
            max_padding = budget_blocks if dimension == "prompt_ctx" else quarter
        return span.minimum, span.step, span.maximum, max_padding, max_percent


def padding_aware_range(minimum: int, step: int, maximum: int, max_padding: int, max_percent: int) -> list[int]:
    """Return the sizes from ``minimum`` to ``maximum``, ascending; ``maximum`` is always one of them. Pure.

    Sizes double up to ``step``. From there a multiple of ``step`` is kept if without it the smallest shape that needs the
    next one would be padded by more than ``max_padding``, or by a larger share of that one than ``max_percent``; and if
    it is a multiple of ``max_padding``.

    Args:
        minimum: Smallest size, at least 0.
        step: At least 1.
        maximum: Largest size.
        max_padding: Most padding; 0: ``maximum``.
        max_percent: Most padding in percent of a size, 0 to 50.

    Raises:
        ValueError: ``minimum`` is above ``maximum``.
    """
    if minimum > maximum:
        raise ValueError(f"no size from {minimum} to {maximum} in steps of {step}")
    max_padding = max_padding or maximum
    sizes, size = [minimum], minimum
    while size <= maximum:
        if size <= step:
            following = 2 * sizes[-1] or 1
            if following <= maximum:
                sizes.append(following)
        else:
            following = size + step
            padding = following - sizes[-1] - 1
            is_needed = 100 * padding > max_percent * following or padding > max_padding or size % max_padding == 0
            if is_needed and size != sizes[-1]:
                sizes.append(size)
        size = following
    if sizes[-1] != maximum:
        sizes.append(maximum)
    return sizes
