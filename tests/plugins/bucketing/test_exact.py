from __future__ import annotations

from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.exact import Exact
from trencadis_testing.bucketing import SAMPLE_LIMITS, BucketingConformance


class TestExact(BucketingConformance):
    def make(self, limits):
        return Exact()


def test_exact_prepares_nothing_and_pads_nothing():
    assert Exact().buckets(SAMPLE_LIMITS["drafts"]) == ()
    assert Exact().bucket_for(Shape(3, 1, 17, Phase.DECODE)) == Bucket(3, 1, 17, Phase.DECODE)
