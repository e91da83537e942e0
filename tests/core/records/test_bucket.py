from __future__ import annotations

import pickle

import attrs
import pytest

from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket, UnifiedShape

LIMITS = BucketLimits(
    block_size=16,
    max_model_len=100,
    max_num_seqs=4,
    max_num_batched_tokens=300,
    max_prefill_batch_size=1,
    num_blocks=20,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)


def test_bucket_covers_what_is_smaller_in_every_dimension_and_of_its_phase() -> None:
    bucket = Bucket(4, 8, 2)
    assert bucket.covers(Shape(4, 8, 2))
    assert not any(bucket.covers(Shape(*sizes)) for sizes in ((5, 1, 0), (1, 9, 0), (1, 1, 3)))
    assert not bucket.covers(Shape(1, 1, 1, Phase.DECODE))


def test_unified_bucket_covers_what_is_smaller_in_every_dimension_and_causal_only_if_it_is() -> None:
    bucket = UnifiedBucket(8, 2, 4, False)
    assert bucket.covers(UnifiedShape(8, 2, 4, False))
    assert UnifiedBucket(8, 2, 4, True).covers(UnifiedShape(8, 2, 4, False))
    assert not bucket.covers(UnifiedShape(1, 0, 0, True))
    assert not any(bucket.covers(UnifiedShape(*sizes, False)) for sizes in ((9, 0, 0), (1, 3, 0), (1, 0, 5)))


def test_buckets_of_one_kind_do_not_serve_shapes_of_the_other() -> None:
    assert not Bucket(9, 9, 9).covers(UnifiedShape(1, 0, 0, True))
    assert not UnifiedBucket(9, 9, 9, True).covers(Shape(1, 1, 0))


def test_exact_bucket_of_a_shape_has_its_kind_and_covers_it() -> None:
    for shape in (Shape(2, 3, 4, Phase.DECODE), UnifiedShape(7, 2, 5, False), UnifiedShape(7, 2, 5, True)):
        bucket = Bucket.of(shape)
        assert bucket.covers(shape)
        assert attrs.asdict(bucket) == attrs.asdict(shape)
    assert type(Bucket.of(UnifiedShape(7, 2, 5, True))) is UnifiedBucket


@pytest.mark.parametrize("is_causal", [False, True])
def test_unified_shape_is_one_row_whose_phase_says_whether_it_is_causal(is_causal: bool) -> None:
    shape = UnifiedShape(7, 2, 5, is_causal)
    assert (shape.batch_size, shape.num_tokens) == (1, 7)
    assert shape.phase is (Phase.PREFILL if is_causal else Phase.DECODE)
    assert attrs.evolve(shape, is_causal=not is_causal).phase is not shape.phase


def test_unified_buckets_are_ordered_by_their_four_dimensions_and_survive_a_pipe() -> None:
    ascending = [UnifiedBucket(1, 9, 9, True), UnifiedBucket(2, 0, 9, False), UnifiedBucket(2, 0, 9, True)]
    assert sorted([*ascending[1:], ascending[0]]) == ascending
    assert len(set(ascending)) == 3
    assert pickle.loads(pickle.dumps(ascending)) == ascending


def test_merged_prompts_share_a_row_of_more_than_one_sequence() -> None:
    assert (LIMITS.max_prefill_query_len, LIMITS.max_context_blocks) == (100, 7)
    merged = attrs.evolve(LIMITS, max_merged_prefills=4)
    assert (merged.max_prefill_query_len, merged.max_context_blocks) == (300, 28)


@pytest.mark.parametrize(("seqs", "blocks"), [(4, 20), (2, 14)])
def test_no_more_blocks_are_shared_than_there_are_or_sequences_hold(seqs: int, blocks: int) -> None:
    assert attrs.evolve(LIMITS, max_num_seqs=seqs).max_shared_blocks == blocks
