from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, fields
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.filled import fill_range, filled_decode_buckets, filled_prefill_buckets, filled_sizes

QUERIES = range(128, 1025, 128)
BLOCKS = [128, 256, 384, 512, 640, 768, 896, 1024, 1408, 1792, 2432, 3328, 4352, 5888]


@pytest.mark.parametrize(("maximum", "same"), [(5760, False), (5761, True), (5790, True), (5791, False)])
def test_thirty_cache_sizes_have_the_same_counts(maximum, same):
    assert (fill_range(128, 128, maximum, 14) == BLOCKS) is same


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((1, 1, 4, 3), [1, 2, 4]),
        ((1, 1, 1, 1), [1]),
        ((1, 1, 7, 1), [7]),
        # as many multiples as sizes were asked for: all of them
        ((128, 128, 1024, 11), [128, 256, 384, 512, 640, 768, 896, 1024]),
        # 1, 1.6, 2.5, 4: the second point is rounded to 2, the third to 3
        ((1, 1, 4, 4), [1, 2, 3, 4]),
        # all of them, and none beyond the end
        ((1, 1, 4, 6), [1, 2, 3, 4]),
        # no multiple is at most 100: the step alone
        ((128, 128, 100, 7), [128]),
    ],
)
def test_range_fills_coinciding_sizes_up(arguments, sizes):
    assert fill_range(*arguments) == sizes
    assert fill_range(128, 128, 5781, 14, exact_end=True) == [*BLOCKS[:-1], 5781]


def test_range_of_no_size_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1"):
        fill_range(1, 1, 8, 0)


def test_prefill_counts_the_context_against_the_token_budget():
    limits = attrs.evolve(SMALL, max_num_batched_tokens=600, max_prefill_batch_size=2)
    buckets = filled_prefill_buckets(limits, batch_sizes=[1, 2], query_lens=QUERIES)
    assert fields(buckets) == [
        (1, 128, 0), (1, 128, 1), (1, 128, 2), (1, 128, 3),
        (1, 256, 0), (1, 256, 1), (1, 256, 2),
        (1, 384, 0), (1, 384, 1),
        (1, 512, 0),
        (2, 128, 0), (2, 128, 1),
        (2, 256, 0),
    ]  # fmt: skip


def test_prefill_context_ends_with_the_model():
    limits = attrs.evolve(SMALL, max_model_len=512, max_num_batched_tokens=4096)
    buckets = filled_prefill_buckets(limits, batch_sizes=[1], query_lens=QUERIES)
    assert fields(buckets) == [
        (1, query, context) for query in (128, 256, 384, 512) for context in range(5 - query // 128)
    ]


def test_prefill_has_no_context_without_prefix_caching():
    limits = attrs.evolve(SMALL, prefix_caching=False)
    assert {bucket.num_blocks for bucket in filled_prefill_buckets(limits, batch_sizes=[1], query_lens=QUERIES)} == {0}


def test_prefill_of_a_budget_below_a_block_is_empty():
    limits = attrs.evolve(SMALL, max_num_batched_tokens=100)
    assert filled_prefill_buckets(limits, batch_sizes=[1], query_lens=QUERIES) == ()


def test_decode_with_drafts_has_longer_queries_or_more_rows():
    limits = attrs.evolve(SMALL, max_draft_tokens=1)
    longer = filled_decode_buckets(limits, batch_sizes=[4], num_blocks=[5781], flat_drafts=False)
    flat = filled_decode_buckets(limits, batch_sizes=[4], num_blocks=[5781], flat_drafts=True)
    assert longer == (Bucket(4, 1, 5781, Phase.DECODE), Bucket(4, 2, 5781, Phase.DECODE))
    assert fields(flat) == [(4, 1, 5781), (8, 1, 64)]  # eight rows list at most 8 · 8 blocks


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (Shape(3, 412, 5), (4, 512, 6)),
        (Shape(1, 1, 0), (1, 128, 0)),
        (Shape(4, 256, 8), (4, 256, 8)),
        (Shape(5, 1, 13, Phase.DECODE), (8, 1, 14)),
        (Shape(1, 3, 2, Phase.DECODE), (1, 3, 2)),
    ],
)
def test_fallback_is_a_power_of_two_of_sequences_whole_blocks_of_tokens_and_an_even_context(shape, sizes):
    assert filled_sizes(shape, block_size=128) == sizes
