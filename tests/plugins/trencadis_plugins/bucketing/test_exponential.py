from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, of_phase
from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_plugins.bucketing.exponential import Exponential, exponential_range
from trencadis_plugins.bucketing.prompt_rules import PromptRules
from trencadis_testing.bucketing import BucketingConformance


class TestExponential(BucketingConformance):
    make = Exponential


class TestExponentialOfOneSize(BucketingConformance):
    """The other end of the config: one size in each dimension."""

    def make(self, limits):
        return Exponential(limits, ExponentialConfig(limit=1))


class TestExponentialInSlices(BucketingConformance):
    """Long queries are whole slices of 48 tokens."""

    def make(self, limits):
        rules = PromptRules(slice_queries=True, slice_tokens=48, slice_threshold=64)
        return Exponential(limits, ExponentialConfig(prompts=rules))

    def is_within(self, bucket, limits):
        """The kernel computes whole slices, also where the longest query is none."""
        longest = limits.max_prefill_query_len
        if bucket.phase is Phase.PREFILL and bucket.query_len == -(-longest // 48) * 48:
            bucket = attrs.evolve(bucket, query_len=longest)
        return super().is_within(bucket, limits)


class TestExponentialWithoutClamp(BucketingConformance):
    def make(self, limits):
        return Exponential(limits, ExponentialConfig(clamp_decode_blocks=False))


def limits(seqs, tokens, length, blocks, contiguous=False):
    return attrs.evolve(
        SMALL,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        num_blocks=blocks,
        contiguous=contiguous,
    )


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((128, 128, 2048, 10), [128, 256, 384, 512, 640, 896, 1152, 1536, 2048]),
        ((128, 128, 4096, 13), [128, 256, 384, 512, 640, 768, 1024, 1408, 1792, 2304, 3072, 4096]),
        ((128, 128, 1024, 10), [128, 256, 384, 512, 768, 896, 1024]),
        ((128, 128, 2048, 11), [128, 256, 384, 512, 768, 896, 1280, 1664, 2048]),
        ((128, 128, 8192, 13), [128, 256, 384, 512, 768, 1024, 1536, 2048, 2944, 4096, 5888, 8192]),
        ((1, 2, 256, 9), [1, 2, 4, 8, 14, 24, 42, 78, 140, 256]),
        ((1, 2, 138, 9), [1, 2, 4, 6, 10, 18, 30, 48, 82, 138]),
        ((1, 2, 21, 6), [1, 2, 4, 6, 10, 14, 21]),
        ((1, 2, 4, 3), [1, 2, 4]),
        ((1, 2, 3, 3), [1, 2, 3]),
        ((1, 2, 1, 1), [1]),
        ((0, 1, 192, 9), [0, 1, 2, 4, 8, 14, 27, 52, 100, 192]),
        ((0, 1, 7, 4), [0, 1, 2, 4, 7]),
        ((1, 256, 4127, 14), [1, 256, 512, 768, 1024, 1280, 1536, 1792, 2304, 2816, 3584, 4127]),
    ],
)
def test_range_equals_the_sizes_of_the_vendor(arguments, sizes):
    assert exponential_range(*arguments) == sizes


def test_range_of_one_size_is_the_largest_without_the_small_one():
    assert exponential_range(0, 1, 7, 1) == [7]


def test_range_whose_first_size_is_above_the_largest_is_the_largest():
    assert exponential_range(128, 128, 64, 6) == [64]


def test_ranges_are_logged_as_the_vendor_does(caplog):
    with caplog.at_level("INFO"):
        Exponential(limits(4, 1024, 1024, 5781))
    head = "bucket config (min, step, max_warmup, limit)"
    assert f"Prompt {head} bs:[1, 2, 1, 1], query:[128, 128, 1024, 10], blocks:[0, 1, 7, 4]" in caplog.text
    assert f"Decode {head} bs:[1, 2, 4, 3], block:[1, 4, 32, 6]" in caplog.text


def test_range_of_no_size_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1"):
        exponential_range(1, 2, 8, 0)


@pytest.mark.parametrize(
    ("case", "num_prefill", "num_decode"),
    [
        (limits(4, 1024, 1024, 5781), 35, 13),
        (limits(4, 1024, 1024, 5781, contiguous=True), 35, 24),
        (limits(256, 8192, 32768, 4127), 120, 87),
        (limits(256, 8192, 32768, 4127, contiguous=True), 120, 120),
        (limits(128, 2048, 4352, 1519), 72, 47),
        (limits(21, 8192, 131072, 3000), 144, 97),
    ],
)
def test_table_is_as_large_as_the_vendors(case, num_prefill, num_decode):
    table = Exponential(case).buckets(case)
    assert len(of_phase(table, Phase.PREFILL)) == num_prefill
    assert len(of_phase(table, Phase.DECODE)) == num_decode


def test_decode_buckets_equal_the_vendors_list():
    table = Exponential(SMALL).buckets(SMALL)
    pairs = [(bucket.batch_size, bucket.num_blocks) for bucket in of_phase(table, Phase.DECODE)]
    assert pairs == [
        (1, 1), (1, 4), (1, 8),
        (2, 4), (2, 8), (2, 12), (2, 16),
        (4, 4), (4, 8), (4, 12), (4, 16), (4, 24), (4, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (limits(4, 1024, 1024, 5781, contiguous=True), [1, 4, 8, 12, 16, 24, 32, 5781]),
        (limits(256, 8192, 32768, 4127, contiguous=True), exponential_range(1, 256, 4127, 14)),
    ],
    ids=["small", "large"],
)
def test_contiguous_decode_buckets_reach_over_the_whole_cache(case, expected):
    sizes = {bucket.num_blocks for bucket in of_phase(Exponential(case).buckets(case), Phase.DECODE)}
    assert sorted(sizes) == expected


def test_decode_blocks_end_with_the_longest_tables_of_all_sequences():
    case = limits(128, 2048, 4352, 1519)
    full = [bucket.num_blocks for bucket in Exponential(case).buckets(case) if bucket.batch_size == 128]
    assert full == [128, 256, 384, 512, 768, 896, 1152, 1536, 2048, 2560, 3328, 4352]


def test_decode_blocks_end_at_three_times_the_cache_where_tables_could_share_more():
    case = limits(256, 8192, 32768, 4127)
    assert max(bucket.num_blocks for bucket in Exponential(case).buckets(case)) == 3 * 4127


def test_long_context_follows_the_query_length():
    case = limits(256, 8192, 32768, 4127)
    contexts = {}
    for bucket in of_phase(Exponential(case).buckets(case), Phase.PREFILL):
        contexts.setdefault(bucket.query_len, []).append(bucket.num_blocks)
    assert contexts[128] == [0, 1, 2, 4, 8, 14, 27, 52, 100, 255]
    assert contexts[8192][-1] == (32768 - 8192) // 128


def test_context_of_a_model_of_8192_tokens_starts_behind_a_full_budget():
    case = limits(4, 2048, 8192, 1000)
    contexts = [bucket.num_blocks for bucket in Exponential(case).buckets(case) if bucket.query_len == 2048]
    assert contexts == exponential_range(0, 1, (8192 - 2048) // 128, 7)


def test_prefill_batches_grow_like_decode_batches():
    case = attrs.evolve(limits(64, 8192, 1024, 1000), max_prefill_batch_size=21)
    prefill = of_phase(Exponential(case).buckets(case), Phase.PREFILL)
    assert sorted({bucket.batch_size for bucket in prefill}) == [1, 2, 4, 6, 10, 14, 21]
    assert max(bucket.query_len for bucket in prefill if bucket.batch_size == 21) * 21 <= 8192


@pytest.mark.parametrize(
    ("case", "contexts"),
    [(limits(4, 128, 200, 1000), [0, 1]), (limits(4, 8192, 8192, 1000), [0, 63])],
)
def test_range_of_one_context_block_keeps_the_pass_without_context(case, contexts):
    buckets = Exponential(case).buckets(case)
    assert [bucket.num_blocks for bucket in buckets if bucket.query_len == 128] == contexts


def test_budget_of_two_tokens_has_one_query_length():
    case = attrs.evolve(limits(1, 2, 8, 8), block_size=1)
    assert {bucket.query_len for bucket in of_phase(Exponential(case).buckets(case), Phase.PREFILL)} == {2}


def test_limit_sets_the_number_of_sizes_and_a_dimensions_own_limit_wins():
    config = ExponentialConfig(limit=1, prompt_query_limit=4)
    prefill = of_phase(Exponential(SMALL, config).buckets(SMALL), Phase.PREFILL)
    decode = of_phase(Exponential(SMALL, config).buckets(SMALL), Phase.DECODE)
    assert prefill == [Bucket(1, query_len, 7) for query_len in exponential_range(128, 128, 1024, 4)]
    assert decode == [Bucket(4, 1, 32, Phase.DECODE)]


@pytest.mark.parametrize(
    ("field", "dimension", "phase"),
    [
        ("prompt_bs_limit", "batch_size", Phase.PREFILL),
        ("prompt_query_limit", "query_len", Phase.PREFILL),
        ("prompt_ctx_limit", "num_blocks", Phase.PREFILL),
        ("decode_bs_limit", "batch_size", Phase.DECODE),
        ("decode_block_limit", "num_blocks", Phase.DECODE),
    ],
)
def test_each_limit_belongs_to_its_own_dimension(field, dimension, phase):
    case = attrs.evolve(SMALL, max_prefill_batch_size=4, contiguous=True, num_blocks=32)
    usual = Exponential(case).buckets(case)
    limited = Exponential(case, ExponentialConfig(**{field: 1})).buckets(case)
    for other_phase in Phase:
        for name in ("batch_size", "query_len", "num_blocks"):
            sizes = {getattr(bucket, name) for bucket in of_phase(limited, other_phase)}
            before = {getattr(bucket, name) for bucket in of_phase(usual, other_phase)}
            if (name, other_phase) == (dimension, phase):
                assert len(sizes) == 1 < len(before)
            elif phase is not other_phase:
                assert sizes == before


def test_drafts_add_every_decode_bucket_for_each_length_of_a_run():
    case = attrs.evolve(SMALL, max_draft_tokens=3)
    with_drafts = of_phase(Exponential(case).buckets(case), Phase.DECODE)
    without = of_phase(Exponential(SMALL).buckets(SMALL), Phase.DECODE)
    assert [bucket for bucket in with_drafts if bucket.query_len == 1] == without
    for query_len in (2, 4):
        assert [attrs.evolve(one, query_len=1) for one in with_drafts if one.query_len == query_len] == without
    assert len(with_drafts) == 3 * len(without)
    assert Exponential(case).bucket_for(Shape(3, 2, 10, Phase.DECODE)) == Bucket(4, 2, 12, Phase.DECODE)
    assert Exponential(case).bucket_for(Shape(3, 3, 10, Phase.DECODE)) == Bucket(4, 4, 12, Phase.DECODE)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        (Shape(1, 100, 0), Bucket(1, 128, 0)),
        (Shape(1, 100, 3), Bucket(1, 128, 4)),
        (Shape(1, 129, 5), Bucket(1, 256, 7)),
        (Shape(2, 1, 13, Phase.DECODE), Bucket(2, 1, 16, Phase.DECODE)),
        (Shape(3, 1, 3, Phase.DECODE), Bucket(4, 1, 4, Phase.DECODE)),
        (Shape(2, 1, 20, Phase.DECODE), Bucket(4, 1, 24, Phase.DECODE)),
    ],
)
def test_prepared_bucket_is_the_next_larger_one(shape, bucket):
    assert Exponential(SMALL).bucket_for(shape) == bucket


def test_shape_beyond_the_table_gets_a_fallback_that_covers_it():
    case = attrs.evolve(SMALL, num_blocks=5)
    assert Exponential(case).bucket_for(Shape(4, 1, 31, Phase.DECODE)) == Bucket(4, 1, 32, Phase.DECODE)


def test_decode_blocks_without_clamp_reach_over_all_tables_and_are_denser():
    case = limits(256, 8192, 32768, 4127)  # 65,536 blocks in tables, a cache of 4,127: 16 doublings, and 4 more
    table = Exponential(case, ExponentialConfig(clamp_decode_blocks=False)).buckets(case)
    sizes = sorted({bucket.num_blocks for bucket in table if bucket.batch_size == 256 and bucket.query_len == 1})
    assert sizes == exponential_range(1, 256, 65536, 16 + 1 + 3 + 1)[1:]


def test_clamp_is_nothing_to_a_cache_that_holds_the_tables():
    without = ExponentialConfig(clamp_decode_blocks=False)
    assert Exponential(SMALL, without).buckets(SMALL) == Exponential(SMALL).buckets(SMALL)


def test_batch_of_one_is_prepared_beside_even_batches():
    """It was missing in September 2025, and every single sequence ran in a batch of two."""
    for case in (SMALL, limits(256, 8192, 32768, 4127)):
        assert 1 in {bucket.batch_size for bucket in of_phase(Exponential(case).buckets(case), Phase.DECODE)}


def test_number_of_decode_counts_is_not_capped():
    """A cap, in April 2026, cut warm-up to a third, and let passes fall between the buckets."""
    case = limits(4, 2048, 32768, 100_000)
    sizes = {bucket.num_blocks for bucket in of_phase(Exponential(case).buckets(case), Phase.DECODE)}
    assert len(sizes) > 6


def test_flat_drafts_take_the_place_of_longer_queries():
    case = attrs.evolve(SMALL, num_blocks=300, max_draft_tokens=2)
    decode = of_phase(Exponential(case, ExponentialConfig(flat_drafts=True)).buckets(case), Phase.DECODE)
    assert len(decode) == 32
    assert {bucket.query_len for bucket in decode} == {1}


@pytest.mark.parametrize("generation", ["2026-08", "2025-07"])
def test_budget_below_every_size_leaves_the_longest_query(generation):
    case = attrs.evolve(SMALL, max_model_len=100, max_num_batched_tokens=120)
    prefill = of_phase(Exponential(case, ExponentialConfig(generation=generation)).buckets(case), Phase.PREFILL)
    assert prefill == [Bucket(1, 100, 0)]


def test_merged_prompts_have_wider_steps_and_as_much_context_as_all_of_them():
    """Source: vllm-gaudi, extension/bucketing/exponential.py: query (min, 4 steps, budget), context (0, 4, C · P)."""
    limits = BucketLimits(
        block_size=128,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        max_prefill_batch_size=1,
        num_blocks=300,
        contiguous=False,
        prefix_caching=True,
        max_draft_tokens=0,
        max_merged_prefills=4,
    )
    prefill = [bucket for bucket in Exponential(limits).buckets(limits) if bucket.phase is Phase.PREFILL]
    queries, contexts = exponential_range(128, 512, 2048, 11), exponential_range(0, 4, 4 * 7, 4)
    # Four prompts that share the queries evenly leave room for this much context.
    expected = {(1, q, c) for q in queries for c in contexts if c <= 4 * ((1024 - q // 4) // 128)}
    assert {(one.batch_size, one.query_len, one.num_blocks) for one in prefill} == expected
    assert {one.query_len for one in prefill} == {512, 1024, 1536, 2048}
    assert {one.num_blocks for one in prefill} == {0, 4, 8, 16, 28}


def test_query_of_one_token_is_prepared_for_an_engine_that_decodes_what_another_prefilled():
    """Source: vllm-gaudi, extension/bucketing/exponential.py, a smallest query of 1."""
    config = ExponentialConfig(single_token_prompts=True)
    usual, found = (of_phase(Exponential(SMALL, item).buckets(SMALL), Phase.PREFILL) for item in (None, config))
    assert {item.query_len for item in found} == {1} | {item.query_len for item in usual}
    assert {item.num_blocks for item in found if item.query_len == 1} == {0, 1, 2, 4, 7}
    short = attrs.evolve(SMALL, max_model_len=1025)
    prefill = of_phase(Exponential(short, config).buckets(short), Phase.PREFILL)
    assert max(item.num_blocks for item in prefill if item.query_len == 1) == 8


def test_long_context_follows_the_query_length_below_the_maximum_by_hand():
    """Source: vllm-gaudi, extension/bucketing/exponential.py, VLLM_PROMPT_CTX_BUCKET_MAX."""
    case = limits(256, 8192, 32768, 4127)
    contexts = {}
    for bucket in of_phase(Exponential(case, ExponentialConfig(prompt_ctx_max=248)).buckets(case), Phase.PREFILL):
        contexts[bucket.query_len] = max(contexts.get(bucket.query_len, 0), bucket.num_blocks)
    # From 1536 tokens on a query leaves fewer than 248 blocks; shorter ones keep the largest of the range.
    assert {query: contexts[query] for query in (128, 1024, 1536, 2048)} == {128: 192, 1024: 192, 1536: 244, 2048: 240}


def test_spec_decode_buckets_are_said_to_be_so(caplog):
    case = attrs.evolve(SMALL, num_blocks=300, max_draft_tokens=2)
    with caplog.at_level("INFO"):
        Exponential(case, ExponentialConfig(flat_drafts=True))
    assert any(
        message.startswith("Generated 32 spec decode buckets [bs, query, num_blocks]: ") for message in caplog.messages
    )
