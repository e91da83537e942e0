"""The slow definitions of shapes, by hand; and what a fake backend makes of a bucket that is too small."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.errors import StepFailedError
from trencadis.interfaces import AllocationPlan, BackendCapabilities
from trencadis.records import Bucket, Pass, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_testing.driver import BackendDriver, Work
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.shapes import decode_shape, prefill_shape, unified_shape_of, why_too_small

PADDED = BackendCapabilities(layout="padded", default_block_size=4, max_prefill_batch_size=2)
MERGED = attrs.evolve(PADDED, merges_prefills=True)
UNIFIED = attrs.evolve(PADDED, layout="unified")
PLAN = AllocationPlan(num_blocks=40, block_size=4, num_rows=4, max_model_len=64, max_num_batched_tokens=64)


def one_pass(bucket: Bucket, starts: list[int], lengths: list[int]) -> Pass:
    arrays = [np.array(part, np.int32) for part in (range(len(starts)), starts, lengths)]
    return Pass(
        bucket=bucket,
        indices=arrays[0],
        rows=arrays[0],
        starts=arrays[1],
        query_lens=arrays[2],
        num_logits=np.ones(len(starts), np.int32),
        num_prompt_logits=np.zeros(len(starts), np.int32),
    )


def test_prompts_stand_side_by_side_or_follow_each_other() -> None:
    assert prefill_shape([0, 5], [7, 3], block_size=4, merged=False) == Shape(2, 7, 2)
    assert prefill_shape([3, 5], [7, 3], block_size=4, merged=True) == Shape(1, 10, 3)


def test_decodes_read_their_tables_or_a_range() -> None:
    tables = [[6, 2, 30], [9, 1, 31]]
    assert decode_shape([5, 3], [1, 1], tables, block_size=4, contiguous=False) == Shape(2, 1, 3, Phase.DECODE)
    assert decode_shape([5, 3], [1, 1], tables, block_size=4, contiguous=True) == Shape(2, 1, 10, Phase.DECODE)


def test_block_that_several_tokens_read_is_shared() -> None:
    tables = [[7, 2], [7, 3], [9, 4]]
    assert unified_shape_of([5, 6, 4], [1, 1, 3], tables, block_size=4) == UnifiedShape(5, 2, 4, True)


@pytest.mark.parametrize(
    ("capabilities", "bucket", "fault"),
    [
        (PADDED, Bucket(2, 6, 1), ""),
        (PADDED, Bucket(2, 5, 1), "does not hold Shape"),
        (MERGED, Bucket(1, 8, 2), ""),
        (MERGED, Bucket(1, 8, 1), "does not hold Shape"),
        (attrs.evolve(MERGED, max_prefill_batch_size=1), Bucket(1, 8, 2), "2 prompts in a pass of at most 1"),
        (UNIFIED, UnifiedBucket(8, 2, 0, True), ""),
        (UNIFIED, UnifiedBucket(8, 2, 0, False), "does not hold UnifiedShape"),
        (UNIFIED, Bucket(2, 6, 1), "does not hold UnifiedShape"),
    ],
)
def test_bucket_is_held_against_the_layout(capabilities: BackendCapabilities, bucket: Bucket, fault: str) -> None:
    why = why_too_small(one_pass(bucket, [4, 3], [6, 2]), [[1, 2, 3], [4, 5]], capabilities, block_size=4)
    assert fault in why
    assert bool(why) == bool(fault)


@pytest.mark.parametrize("layout", ["padded", "unified"])
def test_fake_backend_refuses_a_bucket_that_does_not_hold_its_pass(layout: str) -> None:
    def shrunk(shape: Shape) -> Bucket:
        bucket = Bucket.of(shape)
        return attrs.evolve(bucket, query_len=bucket.query_len - 1)

    backend = FakeBackend(layout=layout)
    backend.allocate(PLAN)
    driver = BackendDriver(backend, PLAN, bucket=shrunk)
    driver.start(0, [1, 2, 3])
    with pytest.raises(StepFailedError, match="does not hold"):
        driver.step([Work(0)])
