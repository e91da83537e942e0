"""The sizes of unified attention: for backends that have it, and on the shapes of those that pad."""

from __future__ import annotations

from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.config import UnifiedConfig
from trencadis_plugins.bucketing.fallback import max_decode_blocks
from trencadis_plugins.bucketing.generate import decode_buckets, prefill_buckets
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest
from trencadis_plugins.bucketing.unified_table import alpha_points, exponential_points, prepared_buckets

__all__ = ["Unified"]


class Unified(TableStrategy):
    """Few sizes, tied to the number of sequences. Immutable.

    Where one pass holds prefills and decodes, the form's table, with the largest pass in it. Else the form's sizes in each
    dimension of prefill and decode passes.

    Args:
        limits: What ``bucket_for`` works under.
        config: Which form.
    """

    def __init__(self, limits: BucketLimits, config: UnifiedConfig | None = None) -> None:
        self._config = config if config is not None else UnifiedConfig()
        super().__init__(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill (or causal) buckets, then decode (or other) buckets. Pure."""
        if limits.unified:
            return prepared_buckets(limits, self._config.form)
        prefill = prefill_buckets(
            limits,
            # The largest batch alone would leave a long prompt without a bucket: several of its length exceed the budget.
            batch_sizes=sorted({1, *self._points(limits.max_prefill_batch_size, limits)}),
            query_lens=self._points(limits.max_prefill_query_len, limits),
            context_blocks=[0, *self._points(limits.max_context_blocks, limits)],
        )
        decode = decode_buckets(
            limits,
            batch_sizes=self._points(limits.max_num_seqs, limits),
            num_blocks=self._points(max_decode_blocks(limits), limits),
            flat_drafts=self._config.flat_drafts,
        )
        return or_largest(prefill, limits, Phase.PREFILL) + or_largest(decode, limits, Phase.DECODE)

    def _points(self, maximum: int, limits: BucketLimits) -> list[int]:
        points = alpha_points if self._config.form == "alpha" else exponential_points
        return sorted(size for size in points(maximum, limits.max_num_seqs) if size <= maximum)
