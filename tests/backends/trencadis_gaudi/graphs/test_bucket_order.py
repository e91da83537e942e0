from __future__ import annotations

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.records import Bucket, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_gaudi.graphs.bucket_order import representatives, required_first

SIZES = st.integers(1, 4)
PADDED = st.builds(Bucket, SIZES, SIZES, SIZES, st.sampled_from(Phase))
UNIFIED = st.builds(UnifiedBucket, SIZES, SIZES, SIZES, st.booleans())


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])])
def test_smallest_middling_and_largest_represent_a_phase(count, expected):
    buckets = [Bucket(1, 16 * (n + 1), 0) for n in range(count)]
    assert representatives(buckets[::-1]) == [buckets[n] for n in expected]


@settings(max_examples=60, deadline=None, phases=(Stage.explicit, Stage.generate))
@given(st.one_of(st.lists(PADDED, max_size=12, unique=True), st.lists(UNIFIED, max_size=12, unique=True)))
def test_every_bucket_is_covered_by_one_of_those_in_front_and_none_of_these_by_another(buckets):
    order, num_front = required_first(buckets)
    front = order[:num_front]
    assert sorted(map(repr, order)) == sorted(map(repr, buckets))
    for bucket in buckets:
        assert any(one.covers(shape_of(bucket)) for one in front)
    for one in front:
        assert not any(other.covers(shape_of(one)) for other in front if other != one)


def test_largest_follow_those_in_front():
    buckets = [Bucket(1, query, 0) for query in (128, 512, 256)]
    assert required_first(buckets) == ([buckets[1], buckets[2], buckets[0]], 1)


def shape_of(bucket):
    if isinstance(bucket, UnifiedBucket):
        return UnifiedShape(bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, bucket.is_causal)
    return Shape(bucket.batch_size, bucket.query_len, bucket.num_blocks, bucket.phase)
