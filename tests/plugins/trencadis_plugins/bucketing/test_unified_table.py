from __future__ import annotations

import pytest

from trencadis.records import BucketLimits, UnifiedBucket
from trencadis_plugins.bucketing.unified_table import (
    alpha_points,
    exponential_points,
    unified_buckets,
)


def limits(seqs, length, tokens, blocks, block_size=128):
    return BucketLimits(
        block_size=block_size,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_prefill_batch_size=1,
        num_blocks=blocks,
        contiguous=False,
        prefix_caching=True,
        max_draft_tokens=0,
    )


def values(buckets, name):
    return sorted({getattr(bucket, name) for bucket in buckets})


@pytest.mark.parametrize("length", [1024, 1100, 1151])
def test_alpha_table_equals_the_vendors(length):
    buckets = unified_buckets(limits(32, length, 2048, 5781), "alpha")
    assert len(buckets) == 375
    assert values(buckets, "query_len") == [8, 16, 32, 512, 1024, 2048]
    assert values(buckets, "num_blocks") == [0, 8, 16, 32, 64, 128, 256]
    assert values(buckets, "num_unique_blocks") == [0, 8, 16, 32, 1445, 2890, 5781]
    assert buckets[:2] == (UnifiedBucket(8, 0, 0, True), UnifiedBucket(8, 0, 8, False))
    assert buckets[-2:] == (UnifiedBucket(2048, 256, 2890, True), UnifiedBucket(2048, 256, 5781, True))
    assert [bucket.num_unique_blocks for bucket in buckets[::-1][1:4]] == [2890, 1445, 32]


def test_alpha_table_of_few_sequences_is_as_large_as_the_vendors():
    assert len(unified_buckets(limits(4, 1024, 1024, 300), "alpha")) == 354


def test_exponential_table_equals_the_vendors():
    buckets = unified_buckets(limits(32, 1024, 2048, 5781), "exponential")
    assert len(buckets) == 167
    assert values(buckets, "query_len") == [32, 96, 192, 384, 896, 2048]
    assert values(buckets, "num_blocks") == [0, 8, 32]
    assert values(buckets, "num_unique_blocks") == [0, 32, 64, 128, 352, 864, 2240, 5781]


def test_exponential_table_of_many_sequences_is_as_large_as_the_vendors():
    assert len(unified_buckets(limits(128, 4096, 8192, 1519), "exponential")) == 125


def test_alpha_points_are_quarters_halves_and_wholes_without_nothing():
    assert alpha_points(2048, 32) == {8, 16, 32, 512, 1024, 2048}
    assert alpha_points(3, 2) == {1, 2, 3}
    assert alpha_points(0, 4) == {1, 2, 4}


def test_exponential_points_end_with_the_maximum_and_are_multiples_else():
    assert exponential_points(8, 32) == {8, 32}
    assert exponential_points(1, 1) == {1}
    assert exponential_points(0, 4) == set()


@pytest.mark.parametrize("form", ["alpha", "exponential"])
@pytest.mark.parametrize("case", [limits(1, 1, 1, 1, 1), limits(2, 10, 8, 2, 16), limits(7, 250, 100, 40, 16)])
def test_smallest_limits_leave_a_bucket_and_no_empty_pass(form, case):
    buckets = unified_buckets(case, form)
    assert any(bucket.is_causal for bucket in buckets)
    assert all(bucket.query_len >= 1 for bucket in buckets)
    assert all(bucket.is_causal or bucket.num_blocks or bucket.num_unique_blocks for bucket in buckets)
    assert list(buckets) == sorted(set(buckets))


@pytest.mark.parametrize("form", ["alpha", "exponential"])
def test_pass_without_a_prefill_has_no_more_tokens_than_sequences(form):
    buckets = unified_buckets(limits(32, 1024, 2048, 5781), form)
    assert max(bucket.query_len for bucket in buckets if not bucket.is_causal) == 32
