"""What strategies with a prepared table share: look-up, fallback, and the line that says what was prepared."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trencadis.errors import ConfigValueError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket
from trencadis_plugins.bucketing.fallback import fallback_bucket, max_decode_blocks
from trencadis_plugins.bucketing.prompt_rules import PromptRules
from trencadis_plugins.bucketing.table import BucketTable

__all__ = ["TableStrategy", "or_largest"]

_log = logging.getLogger("trencadis.bucketing")

_MAX_LISTED = 256


class TableStrategy(BucketingStrategy):
    """Answers from the table that ``buckets`` lists, else with a fallback. Immutable.

    Args:
        limits: What ``bucket_for`` works under.
        rules: What query lengths of prefill passes must be.
    """

    def __init__(self, limits: BucketLimits, rules: PromptRules | None = None) -> None:
        self._limits = limits
        self._rules = rules or PromptRules()
        table = self.buckets(limits)
        self._table = BucketTable(table)
        if limits.unified:
            sizes = "[query, shared_blocks, unique_blocks, is_causal]"
            _log.info("Generated %d unified buckets %s: %s", len(table), sizes, _listed(table))
            return
        decode = "spec decode" if limits.max_draft_tokens else "decode"
        for phase, name in ((Phase.PREFILL, "prompt"), (Phase.DECODE, decode)):
            of_phase = [bucket for bucket in table if bucket.phase is phase]
            _log.info("Generated %d %s buckets [bs, query, num_blocks]: %s", len(of_phase), name, _listed(of_phase))

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the prepared bucket of least ``padded_cost`` that covers ``shape``, or a fallback. Pure."""
        return self._table.find(shape) or self.fallback(shape)

    def fallback(self, shape: Shape) -> Bucket:
        """Return a bucket that covers ``shape``, made for it. Pure."""
        return fallback_bucket(shape, self._limits, rules=self._rules)


def _listed(buckets: Sequence[Bucket]) -> str:
    """Return the sizes of buckets, those in the middle of a long list left out."""
    sizes = [_sizes(bucket) for bucket in buckets]
    if len(sizes) <= _MAX_LISTED:
        return str(sizes)
    half = _MAX_LISTED // 2
    return f"{str(sizes[:half])[:-1]}, ..., {str(sizes[-half:])[1:]}"


def _sizes(bucket: Bucket) -> tuple[int, ...]:
    if isinstance(bucket, UnifiedBucket):
        return bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, int(bucket.is_causal)
    return bucket.batch_size, bucket.query_len, bucket.num_blocks


def or_largest(
    buckets: Sequence[Bucket],
    limits: BucketLimits,
    phase: Phase,
    *,
    table: str = "",
    rules: PromptRules | None = None,
) -> tuple[Bucket, ...]:
    """Return ``buckets``, or the bucket that serves most of a phase alone if there are none. Pure.

    In prefill that is the longest query without context; in decode the largest batch with all it can read.

    Args:
        buckets: Of one phase.
        limits: What bounds a shape.
        phase: Of the buckets.
        table: Name of the config table whose values left no bucket; empty if the limits alone did.
        rules: What query lengths of prefill passes must be.

    Raises:
        ConfigValueError: There are none because of values in ``table``.
    """
    if buckets:
        return tuple(buckets)
    if table:
        raise ConfigValueError(
            f"[{table}] leaves no {phase.value} bucket: every combination of its sizes is outside the limits "
            f"(model.max_model_len = {limits.max_model_len}, engine.max_num_batched_tokens = "
            f"{limits.max_num_batched_tokens}, engine.max_num_seqs = {limits.max_num_seqs}).",
            hint="Lower the smallest sizes in the table, or raise the engine's limits.",
        )
    if phase is Phase.PREFILL:
        longest = limits.max_prefill_query_len
        return (Bucket(1, rules.rounded(longest) if rules else longest, 0, phase),)
    return (Bucket(limits.max_num_seqs, 1, max_decode_blocks(limits), phase),)
