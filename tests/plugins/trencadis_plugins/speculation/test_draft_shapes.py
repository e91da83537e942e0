from __future__ import annotations

import random

import pytest

from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_plugins.speculation.draft_shapes import Buckets, Extent, shape_of
from trencadis_testing.shapes import decode_shape, prefill_shape, unified_shape_of

SIZE = 4


def extents(rng: random.Random, count: int, longest: int) -> list[Extent]:
    free = list(range(100))
    rng.shuffle(free)
    found = []
    for _ in range(count):
        start, length = rng.randrange(20), rng.randrange(1, longest + 1)
        blocks = [free.pop() for _ in range(-(-(start + length) // SIZE) + rng.randrange(2))]
        found.append(Extent(start, length, blocks))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_shapes_are_those_of_the_contract(seed: int) -> None:
    rng = random.Random(seed)
    some = extents(rng, rng.randrange(1, 6), rng.choice([1, 4]))
    starts, lengths, tables = [e.start for e in some], [e.length for e in some], [e.blocks for e in some]
    for contiguous in (False, True):
        found = shape_of(
            some,
            Phase.DECODE,
            BackendCapabilities(layout="padded", default_block_size=SIZE, contiguous=contiguous),
            block_size=SIZE,
        )
        assert found == decode_shape(starts, lengths, tables, block_size=SIZE, contiguous=contiguous)
    unified = BackendCapabilities(layout="unified", default_block_size=SIZE)
    assert shape_of(some, Phase.DECODE, unified, block_size=SIZE) == unified_shape_of(
        starts, lengths, tables, block_size=SIZE
    )
    for merged in (False, True):
        padded = BackendCapabilities(layout="padded", default_block_size=SIZE, merges_prefills=merged)
        found = shape_of(some[:1], Phase.PREFILL, padded, block_size=SIZE)
        assert found == prefill_shape(starts[:1], lengths[:1], block_size=SIZE, merged=merged)


class Tens(BucketingStrategy):
    """Rounds batches up to tens; what it lists is another matter."""

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return ()

    def bucket_for(self, shape: Shape) -> Bucket:
        return Bucket(-(-shape.batch_size // 10) * 10, shape.query_len, shape.num_blocks, shape.phase)


def test_a_larger_bucket_that_is_prepared_comes_before_one_that_is_not() -> None:
    def decode(batch_size: int, query_len: int, num_blocks: int) -> Bucket:
        return Bucket(batch_size, query_len, num_blocks, Phase.DECODE)

    prepared = [decode(10, 1, 8), decode(20, 4, 40), decode(20, 2, 40), decode(30, 2, 60), Bucket(99, 99, 99)]
    buckets = Buckets(Tens(), prepared)
    assert buckets.bucket_for(Shape(3, 1, 8, Phase.DECODE)) == decode(10, 1, 8)
    assert buckets.bucket_for(Shape(3, 1, 9, Phase.DECODE)) == decode(20, 2, 40)
    assert buckets.bucket_for(Shape(3, 5, 9, Phase.DECODE)) == decode(10, 5, 9)
    assert Buckets().bucket_for(Shape(3, 5, 9, Phase.DECODE)) == decode(3, 5, 9)
