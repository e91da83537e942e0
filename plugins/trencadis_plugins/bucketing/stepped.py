"""Common part of ``linear`` and ``padding_aware``: a smallest size, a step and a largest size for each dimension.

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
from trencadis_plugins.bucketing.prompt_rules import PromptRules
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest

__all__ = ["Span", "SteppedStrategy"]

_log = logging.getLogger("trencadis.bucketing")

C = TypeVar("C", LinearConfig, PaddingAwareConfig)

_BOUNDS = {"minimum": "min", "step": "step", "maximum": "max"}
"""Fields of a span, and how the config's keys of them end."""

_MERGED_STEP = 4
"""With merged prefill a step of query lengths is so many times the step that is set or derived."""


@attrs.frozen
class Span:
    """The smallest size, the step and the largest size of one dimension."""

    minimum: int
    step: int
    maximum: int


class SteppedStrategy(TableStrategy, Generic[C]):
    """Takes what the config says of a dimension, and derives the rest. Immutable.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: The table's values.

    Raises:
        ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
    """

    table_name: ClassVar[str]
    """Config table, for messages."""

    logged_numbers: ClassVar[str] = "min, step, max_warmup"
    """Names of :meth:`numbers`, for the log."""

    caps_least_blocks: ClassVar[bool] = False
    """Whether the fewest blocks of a decode pass are below the cache's, even where a pass may list more than there are."""

    def __init__(self, limits: BucketLimits, config: C) -> None:
        self._config: C = config
        config.prompts.check(limits, self.table_name)
        if not limits.unified:
            self._log_spans(limits)
        super().__init__(limits, config.prompts)

    @abstractmethod
    def derived(self, limits: BucketLimits) -> Mapping[str, Span]:
        """Return the span of each dimension where the config sets nothing. Pure."""

    @abstractmethod
    def sizes(self, dimension: str, span: Span, limits: BucketLimits) -> list[int]:
        """Return the sizes of a dimension, ascending. Pure.

        Raises:
            ValueError: There is none.
        """

    def numbers(self, dimension: str, span: Span, limits: BucketLimits) -> tuple[int, ...]:
        """Return what the sizes of a dimension follow from. Pure.

        Args:
            dimension: Such as ``prompt_bs``.
            span: The dimension's, from the config and the limits.
            limits: Limits of a shape.
        """
        return attrs.astuple(span)

    def min_query(self, limits: BucketLimits) -> int:
        """Return the shortest query: what the config says, else a block, or less where no query is that long. Pure."""
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        if limits.max_merged_prefills == 1:
            longest = min(self._config.prompt_query_max or longest, longest)
        return self._config.prompt_query_min or min(limits.block_size, longest)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure.

        Raises:
            ConfigValueError: A smallest size is above the largest one, or the sizes leave no bucket.
        """
        # Derived sizes always leave a bucket, so none at all is the config's doing; but rules may rule each of them out.
        rules, table = self._config.prompts, self.table_name
        blamed = table if rules == PromptRules() else ""
        prefill = or_largest(self._prefill(limits), limits, Phase.PREFILL, table=blamed, rules=rules)
        return prefill + or_largest(self._decode(limits), limits, Phase.DECODE, table=table)

    def _prefill(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        max_context = self._config.prompt_ctx_max
        return prefill_buckets(
            limits,
            batch_sizes=self._sizes("prompt_bs", limits),
            query_lens=self._sizes("prompt_query", limits),
            context_blocks=self._sizes("prompt_ctx", limits),
            max_edge=max_context if max_context >= 0 else None,
            rules=self._config.prompts,
        )

    def _decode(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return decode_buckets(
            limits,
            batch_sizes=self._sizes("decode_bs", limits),
            num_blocks=self._sizes("decode_block", limits),
            flat_drafts=self._config.flat_drafts,
        )

    def _sizes(self, dimension: str, limits: BucketLimits) -> list[int]:
        span = self._span(dimension, limits)
        try:
            return self.sizes(dimension, span, limits)
        except ValueError as error:
            raise ConfigValueError(
                f"[{self.table_name}] {dimension}_min = {span.minimum}: {error}.",
                hint=f"Lower {dimension}_min, raise {dimension}_max, or raise the engine's limit that caps it.",
            ) from error

    def _span(self, dimension: str, limits: BucketLimits) -> Span:
        """Return what the config says of a dimension, cut to what the engine allows, or what is derived."""
        derived, wanted = self.derived(limits)[dimension], self._wanted(dimension)
        minimum, step = wanted.minimum or derived.minimum, wanted.step or derived.step
        # Only for the context is 0 a maximum of its own: -1 derives it.
        is_derived = wanted.maximum < 0 if dimension == "prompt_ctx" else not wanted.maximum
        # Any count of listed blocks is legal. Those beyond what sequences hold become what they hold: one is enough.
        most = _most(limits).get(dimension, -(-max(derived.maximum, minimum) // step) * step)
        maximum = derived.maximum if is_derived else min(wanted.maximum, most)
        if limits.max_merged_prefills > 1 and dimension == "prompt_bs":
            return Span(1, 1, 1)
        if limits.max_merged_prefills > 1 and dimension == "prompt_query":
            # A row of several prompts fills the token budget, so the longest query is the budget, whatever is set.
            return Span(minimum, _MERGED_STEP * step, derived.maximum)
        if dimension == "decode_block":
            minimum = self._least_blocks(minimum, step, maximum, limits)
        return Span(minimum, step, maximum)

    def _least_blocks(self, minimum: int, step: int, maximum: int, limits: BucketLimits) -> int:
        """Return the fewest blocks of a decode pass: one that is above the most is lowered to a step below these."""
        for most in (limits.num_blocks, maximum) if self.caps_least_blocks else (maximum,):
            if minimum > most:
                minimum = max(1, most - step)
        return minimum

    def _wanted(self, dimension: str) -> Span:
        return Span(*(getattr(self._config, f"{dimension}_{bound}") for bound in _BOUNDS.values()))

    def _log_spans(self, limits: BucketLimits) -> None:
        """Log the spans as the vendor does, and each value of the config that another one takes the place of."""
        spans = {dimension: self._span(dimension, limits) for dimension in self.derived(limits)}
        for phase in ("Prompt", "Decode"):
            own = {name: span for name, span in spans.items() if name.startswith(phase.lower())}
            # The vendor calls the context of a prompt its blocks.
            listed = [
                f"{name[7:].replace('ctx', 'blocks')}:{list(self.numbers(name, span, limits))}"
                for name, span in own.items()
            ]
            _log.info("%s bucket config (%s) %s", phase, self.logged_numbers, ", ".join(listed))
        for name, span in spans.items():
            derived, wanted = self.derived(limits)[name], self._wanted(name)
            for field, bound in _BOUNDS.items():
                value, asked, default = (getattr(item, field) for item in (span, wanted, derived))
                _log.debug("VLLM_%s_BUCKET_%s=%d (default:%d)", name.upper(), bound.upper(), value, default)
                if asked > 0 and value != asked:
                    change = f"{name}_{bound} = {asked}: {_reason(field, asked, value)}, so {value}"
                    _log.info("[%s] %s", self.table_name, change)


def _reason(field: str, asked: int, value: int) -> str:
    if value < asked:
        return "above what the engine allows"
    return (
        f"{_MERGED_STEP} times as much where prompts are merged"
        if field == "step"
        else "merged prompts fill the budget"
    )


def _most(limits: BucketLimits) -> dict[str, int]:
    """Return the largest legal size of each dimension, but of decode blocks without contiguous ones: any count is legal."""
    most = {
        "prompt_bs": limits.max_prefill_batch_size,
        "prompt_query": limits.max_num_batched_tokens,
        "prompt_ctx": limits.max_context_blocks,
        "decode_bs": limits.max_num_seqs,
    }
    return most | ({"decode_block": limits.num_blocks} if limits.contiguous else {})
