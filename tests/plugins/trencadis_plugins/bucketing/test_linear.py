from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, of_phase
from trencadis.errors import ConfigValueError
from trencadis.records import Phase
from trencadis_plugins.bucketing.config import LinearConfig
from trencadis_plugins.bucketing.linear import Linear, linear_range
from trencadis_testing.bucketing import BucketingConformance


class TestLinear(BucketingConformance):
    make = Linear


class TestLinearWithMaximaByHand(BucketingConformance):
    def make(self, limits):
        return Linear(limits, LinearConfig(prompt_query_max=64, prompt_ctx_max=2, decode_block_max=40))


def sizes(config, dimension, phase, limits=SMALL):
    buckets = Linear(limits, config).buckets(limits)
    return sorted({getattr(bucket, dimension) for bucket in buckets if bucket.phase is phase})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((2, 32, 64), [2, 4, 8, 16, 32, 64]),
        ((128, 128, 512), [128, 256, 384, 512]),
        ((1, 32, 4), [1, 2, 4]),
        ((1, 128, 4), [1, 2, 4]),
        ((1, 32, 256), [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]),
        ((3, 32, 100), [3, 6, 12, 24, 32, 64, 96]),
        ((0, 1, 7), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((0, 4, 10), [0, 4, 8]),
        ((0, 1, 0), [0]),
        ((200, 128, 400), [256, 384]),
    ],
)
def test_range_equals_the_sizes_of_the_vendor(arguments, expected):
    assert linear_range(*arguments) == expected


@pytest.mark.parametrize("arguments", [(5, 1, 4), (200, 128, 250)])
def test_range_without_a_size_is_refused(arguments):
    with pytest.raises(ValueError, match="no size from"):
        linear_range(*arguments)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("case", "num_prefill", "num_decode"),
    [
        ({}, 64, 12),
        ({"contiguous": True, "num_blocks": 1519}, 64, 57),
        (
            {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 32768, "num_blocks": 4127},
            16321,
            2390,
        ),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 128, "num_blocks": 4127, "contiguous": True}, 8, 520),
    ],
)
def test_table_is_as_large_as_the_vendors(case, num_prefill, num_decode):
    limits = attrs.evolve(SMALL, **case)
    table = Linear(SMALL).buckets(limits)
    assert len(of_phase(table, Phase.PREFILL)) == num_prefill
    assert len(of_phase(table, Phase.DECODE)) == num_decode


CACHE, FOUR = {"contiguous": True, "num_blocks": 300}, {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("changes", "config", "dimension", "phase", "expected"),
    [
        ({}, {"prompt_bs_min": 2, "prompt_bs_step": 4, "prompt_bs_max": 8}, "batch_size", Phase.PREFILL, [2, 4, 8]),
        ({}, {"prompt_query_min": 64, "prompt_query_max": 300}, "query_len", Phase.PREFILL, [64, 128, 256]),
        ({}, {"prompt_query_step": 512}, "query_len", Phase.PREFILL, [128, 256, 512, 1024]),
        ({}, {"prompt_ctx_step": 3}, "num_blocks", Phase.PREFILL, [0, 3, 6]),
        ({}, {"prompt_ctx_min": 2, "prompt_ctx_max": 4}, "num_blocks", Phase.PREFILL, [2, 3, 4]),
        ({}, {"prompt_ctx_max": 0}, "num_blocks", Phase.PREFILL, [0]),
        ({"max_model_len": 16384}, {"prompt_ctx_max": 0}, "num_blocks", Phase.PREFILL, [0]),
        # a model shorter than a block keeps a bucket for its second chunk
        ({"max_model_len": 100, "max_num_batched_tokens": 50}, {}, "num_blocks", Phase.PREFILL, [0, 1]),
        ({}, {"decode_bs_min": 2, "decode_bs_step": 3}, "batch_size", Phase.DECODE, [2, 3, 6]),
        ({}, {"decode_bs_max": 2}, "batch_size", Phase.DECODE, [1, 2]),
        ({}, {"decode_block_min": 8, "decode_block_step": 16}, "num_blocks", Phase.DECODE, [8, 16, 32, 48, 64]),
        ({}, {"decode_block_max": 16}, "num_blocks", Phase.DECODE, [1, 2, 4, 8, 16]),
        # what is above the most is lowered to a step below it, at least one; a sequence has 8 blocks
        (FOUR, {"decode_block_min": 5000, "decode_block_step": 12}, "num_blocks", Phase.DECODE, [8, 16, 32]),
        (
            FOUR,
            {"decode_block_min": 20, "decode_block_max": 10, "decode_block_step": 4},
            "num_blocks",
            Phase.DECODE,
            [8],
        ),
        (
            FOUR,
            {"decode_block_step": 12, "decode_block_max": 5000},
            "num_blocks",
            Phase.DECODE,
            [1, 2, 4, 8, 12, 16, 24, 32],
        ),
        (CACHE, {"decode_block_min": 5000, "decode_block_step": 100}, "num_blocks", Phase.DECODE, [200, 300]),
        ({"contiguous": True, "num_blocks": 256}, {"decode_block_min": 256}, "num_blocks", Phase.DECODE, [256]),
        (CACHE, {"decode_block_max": 5000, "decode_block_min": 256}, "num_blocks", Phase.DECODE, [256, 300]),
    ],
)
def test_each_setting_shapes_its_own_dimension(changes, config, dimension, phase, expected):
    """Source: vllm-gaudi, extension/bucketing/linear.py."""
    limits = attrs.evolve(SMALL, max_prefill_batch_size=8, max_num_seqs=8)
    assert sizes(LinearConfig(**config), dimension, phase, attrs.evolve(limits, **changes)) == expected


def test_maximum_above_the_engines_limit_is_lowered_to_it():
    config = LinearConfig(prompt_bs_max=64, prompt_query_max=10**6, prompt_ctx_max=10**6, decode_bs_max=64)
    assert sizes(config, "batch_size", Phase.PREFILL) == [1]
    assert max(sizes(config, "query_len", Phase.PREFILL)) == 1024
    assert max(sizes(config, "num_blocks", Phase.PREFILL)) == 8
    assert max(sizes(config, "batch_size", Phase.DECODE)) == 4


@pytest.mark.parametrize("dimension", ["prompt_bs", "prompt_query", "prompt_ctx", "decode_bs"])
def test_minimum_above_the_maximum_names_the_setting(dimension):
    config = LinearConfig(**{f"{dimension}_min": 9999})
    with pytest.raises(ConfigValueError, match=rf"\[bucketing.linear\] {dimension}_min = 9999.*{dimension}_max"):
        Linear(SMALL, config)


def test_largest_context_follows_the_query_length_below_the_maximum_by_hand():
    limits = attrs.evolve(SMALL, max_model_len=16384, max_num_batched_tokens=2048)
    buckets = Linear(limits, LinearConfig(prompt_ctx_step=50, prompt_ctx_max=120)).buckets(limits)
    longest = {
        query_len: max(bucket.num_blocks for bucket in buckets if bucket.query_len == query_len)
        for query_len in (128, 1024, 1152, 2048)
    }
    assert longest == {128: 100, 1024: 100, 1152: 119, 2048: 112}


def test_ranges_of_august_2024_have_the_vendors_24_and_48_combinations():
    """Four sequences, steps of 32 and 128, prompts to 1,024 tokens and 2,048 in all: 3 sequences of 412 run as (4, 512)."""
    prompt = [linear_range(1, 32, 4), linear_range(128, 128, 1024)]
    decode = [linear_range(1, 128, 4), linear_range(128, 128, 2048)]
    assert [len(batch_sizes) * len(lengths) for batch_sizes, lengths in (prompt, decode)] == [24, 48]
    assert [next(size for size in sizes if size >= least) for sizes, least in zip(prompt, (3, 412), strict=True)] == [
        4,
        512,
    ]


@pytest.mark.parametrize(
    ("config", "queries"),
    [
        (LinearConfig(), {128, 256, 512, 1024, 1536, 2048}),
        (LinearConfig(prompt_query_step=256), {128, 256, 512, 1024, 2048}),
        (LinearConfig(prompt_query_max=512, prompt_bs_min=2), {128, 256, 512, 1024, 1536, 2048}),
    ],
)
def test_merged_prompts_have_wider_steps_and_as_much_context_as_all_of_them(config, queries):
    """Source: vllm-gaudi, extension/bucketing/linear.py: four times the step of queries, four blocks of context, one row."""
    limits = attrs.evolve(SMALL, max_num_batched_tokens=2048, max_merged_prefills=4)
    prefill = of_phase(Linear(limits, config).buckets(limits), Phase.PREFILL)
    assert {bucket.batch_size for bucket in prefill} == {1}
    assert {bucket.query_len for bucket in prefill} == queries
    assert {bucket.num_blocks for bucket in prefill} == {0, 4, 8, 12, 16, 20, 24, 28}
