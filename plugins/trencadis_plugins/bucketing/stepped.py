"""What ``linear`` and ``padding_aware`` share: a smallest size, a step and a largest size for each dimension.

Source: vllm-gaudi, extension/bucketing/linear.py and padding_aware.py, rules of 2026.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import attrs

from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.config import LinearConfig, PaddingAwareConfig
from trencadis_plugins.bucketing.generate import decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest

__all__ = ["Span", "SteppedStrategy"]

_log = logging.getLogger(__name__)

C = TypeVar("C", LinearConfig, PaddingAwareConfig)


@attrs.frozen
class Span:
    """The smallest size, the step and the largest size of one dimension."""

    minimum: int
    step: int
    maximum: int


class SteppedStrategy(TableStrategy, Generic[C]):
    """Takes what the config says of a dimension, and derives the rest. Immutable.

    Args:
        limits: What ``bucket_for`` works under.
        config: The table's values.

    Raises:
        ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
    """

    table_name: ClassVar[str]
    """Config table, for messages."""

    def __init__(self, limits: BucketLimits, config: C) -> None:
        self._config: C = config
        super().__init__(limits)

    @abstractmethod
    def derived(self, limits: BucketLimits) -> Mapping[str, Span]:
        """Return the span of each dimension where the config sets nothing. Pure."""

    @abstractmethod
    def sizes(self, dimension: str, span: Span, limits: BucketLimits) -> list[int]:
        """Return the sizes of a dimension, ascending. Pure.

        Raises:
            ValueError: There is none.
        """

    def min_query(self, limits: BucketLimits) -> int:
        """Return the shortest query: what the config says, else a block, or less where no query is that long. Pure."""
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        longest = min(self._config.prompt_query_max or longest, longest)
        return self._config.prompt_query_min or min(limits.block_size, longest)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure.

        Raises:
            ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
        """
        # Derived sizes always leave a bucket, so none at all is the config's doing.
        table = self.table_name
        prefill = or_largest(self._prefill(limits), limits, Phase.PREFILL, table=table)
        return prefill + or_largest(self._decode(limits), limits, Phase.DECODE, table=table)

    def _prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        max_context = self._config.prompt_ctx_max
        return prefill_buckets(
            limits,
            batch_sizes=self._sizes("prompt_bs", limits, limits.max_prefill_batch_size),
            query_lens=self._sizes("prompt_query", limits, limits.max_num_batched_tokens),
            context_blocks=self._sizes("prompt_ctx", limits, limits.max_context_blocks),
            max_edge=max_context if max_context >= 0 else None,
        )

    def _decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return decode_buckets(
            limits,
            batch_sizes=self._sizes("decode_bs", limits, limits.max_num_seqs),
            num_blocks=self._sizes("decode_block", limits, limits.num_blocks if limits.contiguous else None),
            flat_drafts=self._config.flat_drafts,
        )

    def _sizes(self, dimension: str, limits: BucketLimits, most: int | None) -> list[int]:
        """Return the sizes of a dimension whose largest legal size is ``most``, or the derived maximum."""
        span = self._span(dimension, limits, most)
        try:
            return self.sizes(dimension, span, limits)
        except ValueError as error:
            raise ConfigValueError(
                f"[{self.table_name}] {dimension}_min = {span.minimum}: {error}.",
                hint=f"Lower {dimension}_min, raise {dimension}_max, or raise the engine's limit that caps it.",
            ) from error

    def _span(self, dimension: str, limits: BucketLimits, most: int | None) -> Span:
        derived = self.derived(limits)[dimension]
        wanted = Span(*(getattr(self._config, f"{dimension}_{end}") for end in ("min", "step", "max")))
        minimum, step = wanted.minimum or derived.minimum, wanted.step or derived.step
        # Only for the context is 0 a maximum of its own: -1 derives it.
        is_derived = wanted.maximum < 0 if dimension == "prompt_ctx" else not wanted.maximum
        maximum = derived.maximum if is_derived else min(wanted.maximum, derived.maximum if most is None else most)
        if not is_derived and wanted.maximum > maximum:
            self._say(f"{dimension}_max = {wanted.maximum}: above what the engine allows, so {maximum}")
        if dimension == "decode_block" and limits.contiguous and minimum > maximum:
            lowered = max(1, maximum - step)
            self._say(f"{dimension}_min = {minimum}: above {maximum}, so {lowered}")
            minimum = lowered
        return Span(minimum, step, maximum)

    def _say(self, change: str) -> None:
        _log.info("[%s] %s", self.table_name, change)
