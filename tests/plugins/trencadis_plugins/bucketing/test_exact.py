from __future__ import annotations

from trencadis.records import Bucket, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_plugins.bucketing.exact import Exact
from trencadis_testing.bucketing import SAMPLE_LIMITS, BucketingConformance, UnifiedBucketingConformance


class TestExact(BucketingConformance):
    def make(self, limits):
        return Exact()


class TestUnifiedExact(UnifiedBucketingConformance):
    def make(self, limits):
        return Exact()


def test_exact_prepares_nothing_and_pads_nothing():
    assert Exact().buckets(SAMPLE_LIMITS["drafts"]) == ()
    assert Exact().bucket_for(Shape(3, 1, 17, Phase.DECODE)) == Bucket(3, 1, 17, Phase.DECODE)
    assert Exact().bucket_for(UnifiedShape(3, 2, 17, True)) == UnifiedBucket(3, 2, 17, True)
