from __future__ import annotations

import attrs
import pytest

from support.strategies.bucket_cases import SMALL
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.fallback import fallback_bucket, fallback_size, max_decode_blocks
from trencadis_plugins.bucketing.prompt_rules import PromptRules

LIMITS = attrs.evolve(SMALL, max_model_len=4096, max_num_seqs=16, max_prefill_batch_size=8, num_blocks=300)


def test_decode_reads_the_cache_or_all_tables():
    assert max_decode_blocks(LIMITS) == 16 * 32
    assert max_decode_blocks(attrs.evolve(LIMITS, contiguous=True)) == 300


@pytest.mark.parametrize(
    ("size", "base", "rounded"),
    [
        (31, 32, 128),
        (4001, 32, 4096),
        (1025, 32, 1056),
        (235, 32, 448),
        (9000, 32, 9408),
        (3, 2, 4),
        (5, 2, 8),
        (9, 2, 12),
        (257, 2, 266),
        (0, 32, 0),
        (1, 32, 1),
    ],
)
def test_fallback_size_equals_the_vendors(size, base, rounded):
    assert fallback_size(size, base=base) == rounded


@pytest.mark.parametrize("base", [2, 32])
def test_fallback_sizes_cover_and_are_stable(base):
    by_definition = {}
    for size in range(2, 3000):
        root = next(root for root in range(1, size + 1) if root**3 >= size)
        by_definition[size] = -(-size // (root * base)) * root * base
    results = set(by_definition.values())
    for size, rounded in by_definition.items():
        assert fallback_size(size, base=base) == (size if size in results else rounded)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        # rounded up in every dimension
        (Shape(3, 31, 3), Bucket(4, 128, 32)),
        # capped at the largest legal size
        (Shape(7, 1, 500, Phase.DECODE), Bucket(8, 1, 512, Phase.DECODE)),
        (Shape(15, 1, 500, Phase.DECODE), Bucket(16, 1, 512, Phase.DECODE)),
        (Shape(1, 1000, 31), Bucket(1, 1024, 32)),
        # never below the request, even an illegal one
        (Shape(1, 1500, 40), Bucket(1, 1500, 40)),
        (Shape(20, 3, 600, Phase.DECODE), Bucket(20, 3, 600, Phase.DECODE)),
        # within the token budget: query as asked for, then the batch, then both
        (Shape(3, 235, 0), Bucket(4, 235, 0)),
        (Shape(3, 256, 0), Bucket(4, 256, 0)),
        (Shape(3, 320, 0), Bucket(3, 320, 0)),
        (Shape(5, 201, 0), Bucket(5, 201, 0)),
        (Shape(3, 1000, 0), Bucket(3, 1000, 0)),
    ],
)
def test_fallback_covers_within_caps_and_budget(shape, bucket):
    assert fallback_bucket(shape, LIMITS) == bucket


@pytest.mark.parametrize(
    ("changes", "shape", "bucket"),
    [
        # the batch is rounded no longer before the query where that is enough
        ({"max_num_batched_tokens": 1152}, Shape(3, 300, 0), Bucket(3, 300, 0)),
        ({"max_num_batched_tokens": 1152, "max_model_len": 384}, Shape(3, 383, 0), Bucket(3, 384, 0)),
        # a contiguous decode ends with the cache, and its blocks are rounded in steps of 32
        ({"contiguous": True}, Shape(2, 1, 299, Phase.DECODE), Bucket(4, 1, 300, Phase.DECODE)),
        ({"max_model_len": 65536}, Shape(1, 31, 31), Bucket(1, 128, 128)),
        # a last block that is partly full counts; drafts take the longest query
        ({"max_model_len": 32 * 128 + 2}, Shape(1, 1, 32), Bucket(1, 1, 33)),
        ({"max_draft_tokens": 3}, Shape(1, 2, 300, Phase.DECODE), Bucket(1, 4, 448, Phase.DECODE)),
    ],
)
def test_fallback_follows_the_limits(changes, shape, bucket):
    assert fallback_bucket(shape, attrs.evolve(LIMITS, **changes)) == bucket


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        (Shape(1, 235, 0), Bucket(1, 700, 0)),
        (Shape(1, 901, 3), Bucket(1, 1000, 32)),
        # the budget pays for the batch, or for whole chunks, not for both
        (Shape(3, 201, 0), Bucket(3, 300, 0)),
        (Shape(1, 3, 5, Phase.DECODE), Bucket(1, 3, 64, Phase.DECODE)),
    ],
)
def test_fallback_of_a_prefill_is_whole_chunks(shape, bucket):
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=1000)
    assert fallback_bucket(shape, limits, rules=PromptRules(query_chunk=100)) == bucket


def test_other_rounding_is_capped_and_covers_all_the_same():
    rounding = lambda shape: (9, shape.query_len + 7, 10**6)  # noqa: E731
    assert fallback_bucket(Shape(2, 100, 3), LIMITS, rounding=rounding) == Bucket(8, 107, 32)
    assert fallback_bucket(Shape(2, 100, 3), LIMITS, rounding=lambda _: (1, 1, 1)) == Bucket(2, 100, 3)
