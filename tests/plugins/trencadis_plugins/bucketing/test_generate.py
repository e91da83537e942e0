from __future__ import annotations

import logging

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, fields
from trencadis.records import Bucket, Phase
from trencadis_plugins.bucketing.generate import (
    corrected,
    decode_buckets,
    decode_query_lens,
    flattened,
    legal_buckets,
    prefill_buckets,
    why_omitted,
    with_drafts,
)

LIMITS = attrs.evolve(
    SMALL, block_size=16, max_model_len=64, max_num_batched_tokens=64, max_prefill_batch_size=4, num_blocks=20
)


def test_prefill_combinations_above_budget_length_or_context_are_left_out():
    buckets = prefill_buckets(LIMITS, batch_sizes=[1, 2], query_lens=[16, 48, 96], context_blocks=[0, 4, 5])
    assert fields(buckets) == [(1, 16, 0), (1, 16, 4), (1, 48, 0), (1, 48, 4), (2, 16, 0), (2, 16, 4)]
    assert {bucket.phase for bucket in buckets} == {Phase.PREFILL}


@pytest.mark.parametrize(
    ("changes", "queries", "contexts", "expected"),
    [
        ({}, [128], [0, 1], []),
        # the largest context is what a long query leaves of a long model, and literal in a shorter one
        (
            {"max_model_len": 8192, "max_num_batched_tokens": 4096},
            [16, 4096],
            [0, 500],
            [(16, 0), (16, 511), (4096, 0), (4096, 256)],
        ),
        (
            {"max_model_len": 8191, "max_num_batched_tokens": 4096},
            [16, 4096],
            [0, 500],
            [(16, 0), (16, 500), (4096, 0), (4096, 500)],
        ),
        ({"max_model_len": 8192, "max_num_batched_tokens": 8192}, [8192], [9], [(8192, 0)]),
        # it may end in a block that is partly full
        ({"max_model_len": 4 * 16 + 2}, [16], [4, 5, 6], [(16, 4), (16, 5)]),
    ],
)
def test_context_is_what_the_model_has_room_for(changes, queries, contexts, expected):
    limits = attrs.evolve(LIMITS, **changes)
    buckets = prefill_buckets(limits, batch_sizes=[1], query_lens=queries, context_blocks=contexts)
    assert fields(buckets) == [(1, *one) for one in expected]


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


@pytest.mark.parametrize(
    ("most", "lens"), [(0, [1]), (1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 4]), (4, [1, 2, 4, 5]), (7, [1, 2, 4, 8])]
)
def test_query_lengths_of_decodes_double_up_to_the_longest(most, lens):
    assert list(decode_query_lens(attrs.evolve(LIMITS, max_draft_tokens=most))) == lens


def test_flattened_rows_read_the_blocks_once_if_there_is_one_for_each_and_once_each():
    limits = attrs.evolve(LIMITS, max_draft_tokens=2)  # three rows each, of four blocks at most
    assert fields(flattened([Bucket(1, 1, 2, Phase.DECODE)], limits)) == [(1, 1, 2), (3, 1, 6)]
    assert fields(flattened([Bucket(1, 1, 3, Phase.DECODE)], limits)) == [(1, 1, 3), (3, 1, 3), (3, 1, 9)]
    assert fields(flattened([Bucket(1, 1, 9, Phase.DECODE)], limits)) == [(1, 1, 9), (3, 1, 9), (3, 1, 12)]


def test_no_drafts_add_nothing():
    seeds = (Bucket(1, 1, 2, Phase.DECODE), Bucket(2, 1, 4, Phase.DECODE))
    assert with_drafts(seeds, LIMITS, flat=False) == with_drafts(seeds, LIMITS, flat=True) == seeds


def test_drafts_add_to_the_filtered_combinations():
    limits = attrs.evolve(LIMITS, max_draft_tokens=1)
    longer, flat = (
        decode_buckets(limits, batch_sizes=[2], num_blocks=[1, 3], flat_drafts=flag) for flag in (False, True)
    )
    assert fields(longer) == [(2, 1, 3), (2, 2, 3)]
    assert fields(flat) == [(2, 1, 3), (4, 1, 6)]


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [
        (Bucket(1, 64, 4), ""),
        (Bucket(1, 16, 5), "5 context blocks, but a sequence has at most 4"),
        (Bucket(1, 65, 0), "a query of 65 tokens, but max_model_len is 64"),
        (Bucket(2, 33, 0), "66 tokens, but max_num_batched_tokens is 64"),
        (Bucket(4, 1, 4, Phase.DECODE), ""),
        (Bucket(4, 1, 3, Phase.DECODE), "3 blocks for 4 sequences"),
    ],
)
def test_omission_says_which_limit_is_exceeded(bucket, reason):
    assert why_omitted(bucket, LIMITS) == reason


def test_contiguous_decode_bucket_is_neither_left_out_nor_corrected():
    limits = attrs.evolve(LIMITS, contiguous=True)
    for bucket in (Bucket(4, 1, 3, Phase.DECODE), Bucket(1, 1, 20, Phase.DECODE)):
        assert why_omitted(bucket, limits) == ""
        assert corrected(bucket, limits) == bucket


def test_decode_bucket_is_cut_to_its_sequences_longest_tables_after_the_filter():
    """Not left out, as until December 2025: else a batch of one would end below its longest table."""
    assert corrected(Bucket(1, 1, 99, Phase.DECODE), LIMITS) == Bucket(1, 1, 4, Phase.DECODE)
    assert legal_buckets([Bucket(2, 1, 9, Phase.DECODE), Bucket(2, 1, 12, Phase.DECODE)], LIMITS) == (
        Bucket(2, 1, 8, Phase.DECODE),
    )


def test_omitted_buckets_are_listed_at_debug(caplog):
    with caplog.at_level(logging.DEBUG):
        legal_buckets([Bucket(1, 16, 0), Bucket(1, 96, 0), Bucket(9, 16, 0)], LIMITS)
        legal_buckets([Bucket(1, 16, 0)], LIMITS)
        legal_buckets([Bucket(3, 1, 2, Phase.DECODE)], LIMITS)
    assert caplog.messages == [
        "Omitted 2 prompt buckets: [(1, 96, 0), (9, 16, 0)]",
        "Omitted 1 decode buckets: [(3, 1, 2)]",
    ]
