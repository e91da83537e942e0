from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, fields, of_phase
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_plugins.bucketing.exponential import Exponential, exponential_range
from trencadis_testing.bucketing import BucketingConformance

PREFILL, DECODE = Phase


class TestExponential(BucketingConformance):
    make = Exponential


class TestExponentialOfOneSize(BucketingConformance):
    """The other end of the config: one size in each dimension."""

    def make(self, limits):
        return Exponential(limits, ExponentialConfig(limit=1))


def limits(seqs, tokens, length, blocks, **other):
    return attrs.evolve(
        SMALL,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        num_blocks=blocks,
        **other,
    )


LARGE = limits(256, 8192, 32768, 4127)


def table_of(case, phase, **config):
    return of_phase(Exponential(case, ExponentialConfig(**config)).buckets(case), phase)


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
        # one size is the largest, without the small one; and a first size above the largest gives way to it
        ((0, 1, 7, 1), [7]),
        ((128, 128, 64, 6), [64]),
    ],
)
def test_range_equals_the_sizes_of_the_vendor(arguments, sizes):
    assert exponential_range(*arguments) == sizes


def test_range_of_no_size_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1"):
        exponential_range(1, 2, 8, 0)


def test_ranges_are_logged_as_the_vendor_does(caplog):
    with caplog.at_level("INFO"):
        Exponential(SMALL)
    head = "bucket config (min, step, max_warmup, limit)"
    assert f"Prompt {head} bs:[1, 2, 1, 1], query:[128, 128, 1024, 10], blocks:[0, 1, 7, 4]" in caplog.text
    assert f"Decode {head} bs:[1, 2, 4, 3], block:[1, 4, 32, 6]" in caplog.text


def test_table_is_as_large_as_the_vendors():
    cases = [SMALL, LARGE, *(attrs.evolve(one, contiguous=True) for one in (SMALL, LARGE))]
    cases += [limits(128, 2048, 4352, 1519), limits(21, 8192, 131072, 3000)]
    assert [(len(table_of(case, PREFILL)), len(table_of(case, DECODE))) for case in cases] == [
        (35, 13), (120, 87), (35, 24), (120, 120), (72, 47), (144, 97),
    ]  # fmt: skip


def test_decode_buckets_equal_the_vendors_list():
    assert fields(table_of(SMALL, DECODE)) == [
        (1, 1, 1), (1, 1, 4), (1, 1, 8),
        (2, 1, 4), (2, 1, 8), (2, 1, 12), (2, 1, 16),
        (4, 1, 4), (4, 1, 8), (4, 1, 12), (4, 1, 16), (4, 1, 24), (4, 1, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "config", "phase", "chosen", "sizes"),
    [
        pytest.param(*row[1:], id=row[0])
        for row in [
            ("a small cache is listed as a whole where it is contiguous",
             attrs.evolve(SMALL, contiguous=True), {}, DECODE, lambda b: True, [1, 4, 8, 12, 16, 24, 32, 5781]),
            ("a large one too",
             attrs.evolve(LARGE, contiguous=True), {}, DECODE, lambda b: True, exponential_range(1, 256, 4127, 14)),
            ("decodes end with the longest tables of all sequences",
             limits(128, 2048, 4352, 1519), {}, DECODE, lambda b: b.batch_size == 128,
             [128, 256, 384, 512, 768, 896, 1152, 1536, 2048, 2560, 3328, 4352]),
            ("without clamp they reach over 65,536 blocks in tables, and 4 doublings more are tried",
             LARGE, {"clamp_decode_blocks": False}, DECODE, lambda b: b.batch_size == 256,
             exponential_range(1, 256, 65536, 16 + 1 + 3 + 1)[1:]),
            ("a short query has the longest context",
             LARGE, {}, PREFILL, lambda b: b.query_len == 128, [0, 1, 2, 4, 8, 14, 27, 52, 100, 255]),
            ("context of a model of 8192 tokens starts behind a full budget",
             limits(4, 2048, 8192, 1000), {}, PREFILL, lambda b: b.query_len == 2048,
             exponential_range(0, 1, (8192 - 2048) // 128, 7)),
            ("a range of one context block keeps the pass without",
             limits(4, 128, 200, 1000), {}, PREFILL, lambda b: b.query_len == 128, [0, 1]),
            ("and so does one of 63",
             limits(4, 8192, 8192, 1000), {}, PREFILL, lambda b: b.query_len == 128, [0, 63]),
        ]
    ],
)  # fmt: skip
def test_blocks_of_chosen_buckets(case, config, phase, chosen, sizes):
    assert sorted({bucket.num_blocks for bucket in table_of(case, phase, **config) if chosen(bucket)}) == sizes


def test_ends_of_ranges_follow_the_engine():
    assert max(bucket.num_blocks for bucket in table_of(LARGE, DECODE)) == 3 * 4127
    assert table_of(LARGE, PREFILL)[-1] == Bucket(1, 8192, (32768 - 8192) // 128)
    assert {one.query_len for one in table_of(attrs.evolve(limits(1, 2, 8, 8), block_size=1), PREFILL)} == {2}
    assert table_of(SMALL, DECODE, clamp_decode_blocks=False) == table_of(SMALL, DECODE)


def test_prefill_batches_grow_like_decode_batches():
    prefill = table_of(limits(64, 8192, 1024, 1000, max_prefill_batch_size=21), PREFILL)
    assert sorted({bucket.batch_size for bucket in prefill}) == [1, 2, 4, 6, 10, 14, 21]
    assert max(bucket.query_len for bucket in prefill if bucket.batch_size == 21) * 21 <= 8192


def test_limit_sets_the_number_of_sizes_and_a_dimensions_own_limit_wins():
    config = {"limit": 1, "prompt_query_limit": 4}
    queries = exponential_range(128, 128, 1024, 4)
    assert table_of(SMALL, PREFILL, **config) == [Bucket(1, query_len, 7) for query_len in queries]
    assert table_of(SMALL, DECODE, **config) == [Bucket(4, 1, 32, DECODE)]


@pytest.mark.parametrize(
    ("field", "dimension", "phase"),
    [
        ("prompt_bs_limit", "batch_size", PREFILL),
        ("prompt_query_limit", "query_len", PREFILL),
        ("prompt_ctx_limit", "num_blocks", PREFILL),
        ("decode_bs_limit", "batch_size", DECODE),
        ("decode_block_limit", "num_blocks", DECODE),
    ],
)
def test_each_limit_belongs_to_its_own_dimension(field, dimension, phase):
    case = attrs.evolve(SMALL, max_prefill_batch_size=4, contiguous=True, num_blocks=32)
    limited, usual = ({getattr(one, dimension) for one in table_of(case, phase, **c)} for c in ({field: 1}, {}))
    assert len(limited) == 1 < len(usual)
    (other,) = set(Phase) - {phase}
    assert table_of(case, other, **{field: 1}) == table_of(case, other)


def test_drafts_add_every_decode_bucket_for_each_length_of_a_run():
    case = attrs.evolve(SMALL, max_draft_tokens=3)
    one, two, four = ([b for b in table_of(case, DECODE) if b.query_len == length] for length in (1, 2, 4))
    assert one == table_of(SMALL, DECODE)
    assert [attrs.evolve(bucket, query_len=1) for bucket in two] == one
    assert [attrs.evolve(bucket, query_len=1) for bucket in four] == one
    assert len(table_of(case, DECODE)) == 3 * len(one)
    assert Exponential(case).bucket_for(Shape(3, 3, 10, DECODE)) == Bucket(4, 4, 12, DECODE)


def test_flat_drafts_take_the_place_of_longer_queries_and_are_said_to_be_spec_decode_buckets(caplog):
    case = attrs.evolve(SMALL, num_blocks=300, max_draft_tokens=2)
    with caplog.at_level("INFO"):
        decode = table_of(case, DECODE, flat_drafts=True)
    assert "Generated 32 spec decode buckets [bs, query, num_blocks]: " in caplog.text
    assert (len(decode), {bucket.query_len for bucket in decode}) == (32, {1})


@pytest.mark.parametrize("generation", ["2026-08", "2025-07"])
def test_budget_below_every_size_leaves_the_longest_query(generation):
    case = attrs.evolve(SMALL, max_model_len=100, max_num_batched_tokens=120)
    assert table_of(case, PREFILL, generation=generation) == [Bucket(1, 100, 0)]


def test_merged_prompts_have_wider_steps_and_as_much_context_as_all_of_them():
    """Source: vllm-gaudi, extension/bucketing/exponential.py: query (min, 4 steps, budget), context (0, 4, C · P)."""
    prefill = table_of(attrs.evolve(SMALL, max_num_batched_tokens=2048, max_merged_prefills=4), PREFILL)
    queries, contexts = exponential_range(128, 512, 2048, 11), exponential_range(0, 4, 4 * 7, 4)
    # Four prompts that share the queries evenly leave room for this much context.
    assert set(fields(prefill)) == {(1, q, c) for q in queries for c in contexts if c <= 4 * ((1024 - q // 4) // 128)}
    assert {one.query_len for one in prefill} == {512, 1024, 1536, 2048}
    assert {one.num_blocks for one in prefill} == {0, 4, 8, 16, 28}


def test_query_of_one_token_is_prepared_for_an_engine_that_decodes_what_another_prefilled():
    """Source: vllm-gaudi, extension/bucketing/exponential.py, a smallest query of 1."""
    usual, found = (table_of(SMALL, PREFILL, single_token_prompts=flag) for flag in (False, True))
    assert {item.query_len for item in found} == {1} | {item.query_len for item in usual}
    assert {item.num_blocks for item in found if item.query_len == 1} == {0, 1, 2, 4, 7}
    prefill = table_of(attrs.evolve(SMALL, max_model_len=1025), PREFILL, single_token_prompts=True)
    assert max(item.num_blocks for item in prefill if item.query_len == 1) == 8


def test_long_context_follows_the_query_length_below_the_maximum_by_hand():
    """Source: vllm-gaudi, extension/bucketing/exponential.py, VLLM_PROMPT_CTX_BUCKET_MAX."""
    contexts = {bucket.query_len: bucket.num_blocks for bucket in table_of(LARGE, PREFILL, prompt_ctx_max=248)}
    # From 1536 tokens on a query leaves fewer than 248 blocks; shorter ones keep the largest of the range.
    assert {query: contexts[query] for query in (128, 1024, 1536, 2048)} == {128: 192, 1024: 192, 1536: 244, 2048: 240}


# ------------------------------------------------------------------------------------------ the rules of July 2025


class TestExponentialOf2025(BucketingConformance):
    def make(self, limits):
        return Exponential(limits, ExponentialConfig(generation="2025-07"))

    def is_within(self, bucket, limits):
        """The older rules list counts up to the whole cache, rounded up to a block size, for every batch."""
        if bucket.phase is DECODE and bucket.num_blocks <= -(-limits.num_blocks // limits.block_size) * (
            limits.block_size
        ):
            return bucket.batch_size <= limits.max_num_seqs and bucket.query_len <= 1 + limits.max_draft_tokens
        return super().is_within(bucket, limits)


def older(case, phase, **setting):
    return table_of(case, phase, generation="2025-07", **setting)


def test_tables_of_july_2025_equal_the_vendors_lists():
    blocks = [128, 256, 384, 512, 640, 768, 896, 1024, 1408, 1792, 2432, 3328, 4352, 5888]
    assert fields(older(SMALL, PREFILL)) == [(1, 128 * i, context) for i in range(1, 9) for context in range(9 - i)]
    assert fields(older(SMALL, DECODE)) == [(batch_size, 1, count) for batch_size in (1, 2, 4) for count in blocks]


def test_limits_of_july_2025_belong_to_their_dimensions():
    settings = [{"limit": 1}, {"prompt_query_limit": 1}, {"decode_bs_limit": 1}, {"decode_block_limit": 4}]
    sizes = [tuple(len(older(SMALL, phase, **setting)) for phase in Phase) for setting in settings]
    assert sizes == [(1, 1), (1, 42), (36, 14), (36, 12)]
    case = attrs.evolve(SMALL, max_prefill_batch_size=4)
    assert {bucket.batch_size for bucket in older(case, PREFILL)} == {1, 2, 4}
    assert {bucket.batch_size for bucket in older(case, PREFILL, prompt_bs_limit=1)} == {4}


def test_ranges_of_july_2025_are_logged_as_the_vendor_did(caplog):
    with caplog.at_level("INFO"):
        older(SMALL, PREFILL)
    head = "bucket config (min, step, max_warmup, limit)"
    assert caplog.messages[:2] == [
        f"Prompt {head} bs:[1, 1, 1, 1], seq:[128, 128, 1024, 11]",
        f"Decode {head} bs:[1, 1, 4, 3], block:[128, 128, 5781, 14]",
    ]
    assert caplog.messages[2].startswith("Generated 36 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), ")
    assert caplog.messages[3].startswith("Generated 42 decode buckets [bs, query, num_blocks]: [(1, 1, 128), ")


def test_fallback_of_july_2025_is_a_power_of_two_and_an_even_context():
    strategy = Exponential(attrs.evolve(SMALL, prefix_caching=False), ExponentialConfig(generation="2025-07"))
    assert strategy.bucket_for(Shape(1, 300, 3)) == Bucket(1, 384, 4)
