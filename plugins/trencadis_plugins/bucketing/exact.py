"""Every shape is its own bucket."""

from __future__ import annotations

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Shape

__all__ = ["Exact"]


class Exact(BucketingStrategy):
    """Pads nothing and prepares nothing: right for a ragged layout, ruinous where each new shape is compiled."""

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return an empty table: shapes are used as they come."""
        return ()

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the bucket of exactly ``shape``, unified or not."""
        return Bucket.of(shape)
