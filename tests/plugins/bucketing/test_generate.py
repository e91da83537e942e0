from __future__ import annotations

import attrs

from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.generate import decode_buckets, prefill_buckets

LIMITS = BucketLimits(
    block_size=16,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_batch_size=4,
    num_blocks=20,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)


def fields(buckets):
    return [(bucket.batch_size, bucket.query_len, bucket.num_blocks) for bucket in buckets]


def test_prefill_combinations_above_budget_length_or_context_are_left_out():
    buckets = prefill_buckets(LIMITS, batch_sizes=[1, 2], query_lens=[16, 48, 96], context_blocks=[0, 4, 5])
    assert fields(buckets) == [(1, 16, 0), (1, 16, 4), (1, 48, 0), (1, 48, 4), (2, 16, 0), (2, 16, 4)]
    assert {bucket.phase for bucket in buckets} == {Phase.PREFILL}


def test_prefill_keeps_the_longest_query_where_no_combination_is_legal():
    buckets = prefill_buckets(LIMITS, batch_sizes=[1], query_lens=[128], context_blocks=[0, 1])
    assert buckets == (Bucket(1, 64, 0),)


def test_largest_context_is_what_a_long_query_leaves_of_a_long_model():
    limits = attrs.evolve(LIMITS, max_model_len=8192, max_num_batched_tokens=4096)
    buckets = prefill_buckets(limits, batch_sizes=[1], query_lens=[16, 4096], context_blocks=[0, 500])
    assert fields(buckets) == [(1, 16, 0), (1, 16, 511), (1, 4096, 0), (1, 4096, 256)]


def test_query_as_long_as_the_model_leaves_no_context():
    limits = attrs.evolve(LIMITS, max_model_len=8192, max_num_batched_tokens=8192)
    assert prefill_buckets(limits, batch_sizes=[1], query_lens=[8192], context_blocks=[9]) == (Bucket(1, 8192, 0),)


def test_context_may_end_in_a_block_that_is_partly_full():
    limits = attrs.evolve(LIMITS, max_model_len=4 * 16 + 2)
    buckets = prefill_buckets(limits, batch_sizes=[1], query_lens=[16], context_blocks=[4, 5, 6])
    assert fields(buckets) == [(1, 16, 4), (1, 16, 5)]


def test_largest_context_is_literal_in_a_short_model():
    limits = attrs.evolve(LIMITS, max_model_len=8191, max_num_batched_tokens=4096)
    buckets = prefill_buckets(limits, batch_sizes=[1], query_lens=[16, 4096], context_blocks=[0, 500])
    assert fields(buckets) == [(1, 16, 0), (1, 16, 500), (1, 4096, 0), (1, 4096, 500)]


def test_largest_context_stays_below_a_maximum_by_hand():
    limits = attrs.evolve(LIMITS, max_model_len=8192, max_num_batched_tokens=8192)
    buckets = prefill_buckets(limits, batch_sizes=[1], query_lens=[16, 4096, 6144], context_blocks=[200], max_edge=256)
    assert fields(buckets) == [(1, 16, 200), (1, 4096, 200), (1, 6144, 128)]


def test_decode_combinations_hold_a_block_for_each_sequence_and_at_most_their_tables():
    buckets = decode_buckets(LIMITS, batch_sizes=[1, 4], num_blocks=[1, 3, 12, 99])
    assert fields(buckets) == [(1, 1, 1), (1, 1, 3), (1, 1, 4), (4, 1, 12), (4, 1, 16)]
    assert {bucket.phase for bucket in buckets} == {Phase.DECODE}


def test_contiguous_decode_keeps_all_combinations_and_adds_the_whole_cache():
    limits = attrs.evolve(LIMITS, contiguous=True)
    buckets = decode_buckets(limits, batch_sizes=[1, 4], num_blocks=[1, 8])
    assert fields(buckets) == [(1, 1, 1), (1, 1, 8), (1, 1, 20), (4, 1, 1), (4, 1, 8), (4, 1, 20)]


def test_drafts_add_a_bucket_of_the_longest_query_for_each():
    limits = attrs.evolve(LIMITS, max_draft_tokens=2)
    assert fields(decode_buckets(limits, batch_sizes=[2], num_blocks=[4])) == [(2, 1, 4), (2, 3, 4)]
