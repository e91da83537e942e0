"""Exponential sizes by the rules of July 2025."""

from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, of_phase
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_testing.bucketing import BucketingConformance


class TestExponentialOf2025(BucketingConformance):
    def make(self, limits):
        return Exponential(limits, ExponentialConfig(generation="2025-07"))

    def is_within(self, bucket, limits):
        """The older rules list counts up to the whole cache, rounded up to a block size, for every batch."""
        if bucket.phase is Phase.DECODE and bucket.num_blocks <= -(-limits.num_blocks // limits.block_size) * (
            limits.block_size
        ):
            return bucket.batch_size <= limits.max_num_seqs and bucket.query_len <= 1 + limits.max_draft_tokens
        return super().is_within(bucket, limits)


def test_tables_of_july_2025_equal_the_vendors_lists():
    table = Exponential(SMALL, ExponentialConfig(generation="2025-07")).buckets(SMALL)
    prefill = [(b.batch_size, b.query_len, b.num_blocks) for b in of_phase(table, Phase.PREFILL)]
    decode = [(b.batch_size, b.query_len, b.num_blocks) for b in of_phase(table, Phase.DECODE)]
    blocks = [128, 256, 384, 512, 640, 768, 896, 1024, 1408, 1792, 2432, 3328, 4352, 5888]
    assert prefill == [(1, 128 * i, context) for i in range(1, 9) for context in range(9 - i)]
    assert decode == [(batch_size, 1, count) for batch_size in (1, 2, 4) for count in blocks]
    assert (len(prefill), len(decode)) == (36, 42)


@pytest.mark.parametrize(
    ("setting", "num_prefill", "num_decode"),
    [
        ({"limit": 1}, 1, 1),
        ({"prompt_query_limit": 1}, 1, 42),
        ({"decode_bs_limit": 1}, 36, 14),
        ({"decode_block_limit": 4}, 36, 12),
    ],
)
def test_limits_of_july_2025_belong_to_their_dimensions(setting, num_prefill, num_decode):
    table = Exponential(SMALL, ExponentialConfig(generation="2025-07", **setting)).buckets(SMALL)
    assert len(of_phase(table, Phase.PREFILL)) == num_prefill
    assert len(of_phase(table, Phase.DECODE)) == num_decode


def test_prefill_batches_of_july_2025_follow_the_limit():
    case = attrs.evolve(SMALL, max_prefill_batch_size=4)
    batches = lambda **setting: {  # noqa: E731
        bucket.batch_size
        for bucket in of_phase(
            Exponential(case, ExponentialConfig(generation="2025-07", **setting)).buckets(case), Phase.PREFILL
        )
    }
    assert batches() == {1, 2, 4}
    assert batches(prompt_bs_limit=1) == {4}


def test_ranges_of_july_2025_are_logged_as_the_vendor_did(caplog):
    with caplog.at_level("INFO"):
        Exponential(SMALL, ExponentialConfig(generation="2025-07"))
    head = "bucket config (min, step, max_warmup, limit)"
    assert caplog.messages[:2] == [
        f"Prompt {head} bs:[1, 1, 1, 1], seq:[128, 128, 1024, 11]",
        f"Decode {head} bs:[1, 1, 4, 3], block:[128, 128, 5781, 14]",
    ]
    assert caplog.messages[2].startswith("Generated 36 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), ")
    assert caplog.messages[3].startswith("Generated 42 decode buckets [bs, query, num_blocks]: [(1, 1, 128), ")


def test_passes_of_july_2025_run_where_the_vendors_page_says():
    """Three sequences of 413 tokens read twelve blocks, which the smallest count of four sequences covers."""
    strategy = Exponential(SMALL, ExponentialConfig(generation="2025-07"))
    assert strategy.bucket_for(Shape(3, 1, 3 * 4, Phase.DECODE)) == Bucket(4, 1, 128, Phase.DECODE)
    three = attrs.evolve(SMALL, max_prefill_batch_size=4, max_num_batched_tokens=2048)
    strategy = Exponential(three, ExponentialConfig(generation="2025-07"))
    assert strategy.bucket_for(Shape(3, 412, 0)) == Bucket(4, 512, 0)


def test_fallback_of_july_2025_is_a_power_of_two_and_an_even_context():
    case = attrs.evolve(SMALL, prefix_caching=False)
    strategy = Exponential(case, ExponentialConfig(generation="2025-07"))
    assert strategy.bucket_for(Shape(1, 300, 3)) == Bucket(1, 384, 4)
