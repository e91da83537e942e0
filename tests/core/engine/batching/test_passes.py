from __future__ import annotations

import logging

import numpy as np
import pytest

from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.guard import Guarded
from trencadis.engine.sequences import SequenceTable
from trencadis.errors import UnpreparedShapeError
from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Drafts, Phase, Plan, UnifiedBucket
from trencadis_testing.engines import ExactShapes


def planner(
    layout: str = "padded",
    *,
    contiguous: bool = False,
    max_prefills: int = 2,
    merges: bool = False,
    refuse: bool = False,
) -> PassPlanner:
    return PassPlanner(
        Guarded(BucketingStrategy, "bucketing", ExactShapes()),
        capabilities=BackendCapabilities(
            layout=layout,
            default_block_size=4,
            max_prefill_batch_size=max_prefills,
            contiguous=contiguous,
            merges_prefills=merges,
        ),
        table=SequenceTable(),
        limits=BucketLimits(
            block_size=4,
            max_model_len=64,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_prefill_batch_size=max_prefills,
            num_blocks=64,
            contiguous=contiguous,
            prefix_caching=True,
            max_draft_tokens=0,
        ),
        refuse_unprepared=refuse,
    )


def plan(starts: list[int], lengths: list[int], drafts: list[int] | None = None) -> Plan:
    n = len(starts)
    return Plan(
        step=0,
        slots=np.arange(n, dtype=np.int32),
        rows=np.arange(n, dtype=np.int32),
        epochs=np.zeros(n, np.int64),
        starts=np.array(starts, np.int32),
        num_scheduled=np.array(lengths, np.int32),
        samples=np.ones(n, np.bool_),
        drafts=None
        if drafts is None
        else Drafts(num_drafts=np.array(drafts, np.int32), token_ids=np.zeros(sum(drafts), np.int32)),
    )


TABLES = np.arange(8 * 40, dtype=np.int32).reshape(8, 40) % 37


def test_ragged_plan_is_one_exact_pass() -> None:
    (one,) = planner("ragged").passes(plan([0, 9, 5], [7, 1, 3]), TABLES)
    assert one.bucket == Bucket(3, 7, 3, Phase.PREFILL)  # context of 9 tokens is three blocks
    assert one.query_lens.tolist() == [7, 1, 3]


def test_padded_prefills_run_in_groups_before_one_decode_pass() -> None:
    passes = planner().passes(plan([0, 9, 0, 4, 30], [7, 1, 12, 5, 1]), TABLES)
    assert [one.indices.tolist() for one in passes] == [[0, 2], [3], [1, 4]]
    assert [one.bucket.phase for one in passes] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]
    assert passes[2].bucket == Bucket(2, 1, 3 + 8, Phase.DECODE)


def test_prefill_rectangle_stays_within_the_token_budget() -> None:
    passes = planner(max_prefills=8).passes(plan([0] * 4, [20, 12, 12, 2]), TABLES)
    for one in passes:
        assert len(one.rows) == 1 or len(one.rows) * int(one.query_lens.max()) <= 32
    assert sorted(index for one in passes for index in one.indices.tolist()) == [0, 1, 2, 3]


class Doubling(ExactShapes):
    """Pads every query length to the next power of two."""

    def bucket_for(self, shape):
        return Bucket(shape.batch_size, 1 << (shape.query_len - 1).bit_length(), shape.num_blocks, shape.phase)


def test_padded_prefill_of_several_sequences_stays_within_the_token_budget() -> None:
    passes = planner(max_prefills=8)
    passes._bucketing = Guarded(BucketingStrategy, "bucketing", Doubling())
    found = passes.passes(plan([0] * 5, [9, 9, 9, 5, 3]), TABLES)
    # Three of nine tokens are 27 as they are, and 48 in their bucket.
    assert [one.bucket.num_tokens for one in found] == [32, 32, 4]
    assert all(one.bucket.num_tokens <= 32 for one in found)
    assert sorted(index for one in found for index in one.indices.tolist()) == list(range(5))


def test_two_prepared_passes_are_preferred_to_one_that_must_be_compiled() -> None:
    passes = planner(max_prefills=2)
    passes.prepared((Bucket(1, 8, 0),))
    assert [one.bucket for one in passes.passes(plan([0, 0], [8, 8]), TABLES)] == [Bucket(1, 8, 0)] * 2
    passes.prepared((Bucket(2, 8, 0),))
    assert [one.bucket for one in passes.passes(plan([0, 0], [8, 8]), TABLES)] == [Bucket(2, 8, 0)]


def test_merged_prefills_are_counted_together_with_their_context() -> None:
    passes = planner(merges=True, max_prefills=8).passes(plan([0, 9, 0, 4], [7, 5, 12, 1]), TABLES)
    assert [one.indices.tolist() for one in passes] == [[0, 1, 2], [3]]
    assert [one.bucket for one in passes] == [Bucket(1, 24, 3), Bucket(1, 1, 2, Phase.DECODE)]


def test_merged_prefills_keep_to_their_number_and_to_the_token_budget() -> None:
    passes = planner(merges=True, max_prefills=3).passes(plan([0] * 6, [20, 11, 10, 2, 2, 2]), TABLES)
    assert [one.indices.tolist() for one in passes] == [[0, 1], [2, 3, 4], [5]]
    assert [one.bucket.query_len for one in passes] == [31, 14, 2]


def test_merged_prefills_are_not_merged_into_a_bucket_that_is_not_prepared() -> None:
    passes = planner(merges=True, max_prefills=8)
    passes.prepared((Bucket(1, 7, 0), Bucket(1, 5, 2), Bucket(1, 12, 2)))
    found = passes.passes(plan([0, 5, 0], [7, 5, 5]), TABLES)
    assert [one.bucket for one in found[:1]] == [Bucket(1, 12, 2)]
    assert found[0].indices.tolist() == [0, 1]


def test_unified_plan_is_one_pass_of_prefills_and_decodes() -> None:
    tables = np.zeros((8, 9), np.int32)
    tables[:4, :3] = [[7, 2, 0], [7, 3, 0], [9, 4, 0], [11, 20, 0]]
    (one,) = planner("unified").passes(plan([5, 6, 4, 0], [1, 1, 3, 7]), tables)
    assert one.bucket == UnifiedBucket(12, 2, 4, is_causal=True)
    assert one.indices.tolist() == [0, 1, 2, 3]
    (one,) = planner("unified").passes(plan([5, 6], [1, 1]), tables)
    assert one.bucket == UnifiedBucket(2, 1, 4, is_causal=False)


def test_drafted_decodes_of_a_unified_plan_are_causal() -> None:
    (one,) = planner("unified").passes(plan([9, 30], [3, 1], [2, 0]), TABLES)
    assert one.bucket.phase is Phase.PREFILL
    assert one.num_logits.tolist() == [3, 1]


def test_unified_bucket_that_was_not_prepared_can_be_refused() -> None:
    passes = planner("unified", refuse=True)
    tables = np.arange(8, dtype=np.int32)[:, None].repeat(9, axis=1)
    passes.prepared((UnifiedBucket(1, 0, 1, False),))
    assert passes.passes(plan([2], [1]), tables)
    with pytest.raises(UnpreparedShapeError, match=r"UnifiedShape.*fits no prepared bucket"):
        passes.passes(plan([2, 2], [1, 1]), tables)


def test_drafted_decodes_are_no_prefills() -> None:
    (one,) = planner().passes(plan([9, 30], [3, 1], [2, 0]), TABLES)
    assert one.bucket.phase is Phase.DECODE
    assert one.num_logits.tolist() == [3, 1]


def test_contiguous_decode_counts_up_to_the_highest_block_in_use() -> None:
    (one,) = planner(contiguous=True).passes(plan([9, 30], [1, 1]), TABLES)
    used = [*TABLES[0, :3].tolist(), *TABLES[1, :8].tolist()]
    assert one.bucket.num_blocks == max(used) + 1


def test_bucket_that_was_not_prepared_is_counted_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    passes = planner()
    passes.prepared((Bucket(1, 1, 1, Phase.DECODE),))
    unprepared = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            passes.passes(plan([9], [1]), TABLES)
            unprepared.append(passes.counts.num_unprepared)
    assert sum(unprepared) == 1
    assert [record.message for record in caplog.records].count(caplog.messages[0]) == 1
    assert "was not prepared" in caplog.messages[0]


def test_bucket_that_was_not_prepared_can_be_refused_each_time() -> None:
    passes = planner(refuse=True)
    passes.passes(plan([9], [1]), TABLES)  # nothing is refused while nothing is prepared
    passes.prepared((Bucket(1, 1, 3, Phase.DECODE),))
    assert passes.passes(plan([9], [1]), TABLES)[0].bucket == Bucket(1, 1, 3, Phase.DECODE)
    for _ in range(2):
        with pytest.raises(UnpreparedShapeError, match=r"num_blocks=6.*fits no prepared bucket"):
            passes.passes(plan([20], [1]), TABLES)
        assert passes.counts.num_unprepared == 1


SMALL, MIDDLING, LARGE = (Bucket(1, 1, count, Phase.DECODE) for count in (4, 8, 16))


class Doubled(ExactShapes):
    """Numbers of blocks are powers of two from 4 to 16; beyond they are as they come."""

    def bucket_for(self, shape):
        found = next((bucket for bucket in (SMALL, MIDDLING, LARGE) if bucket.covers(shape)), None)
        return found or Bucket.of(shape)


def doubling() -> PassPlanner:
    passes = planner()
    passes._bucketing = Guarded(BucketingStrategy, "bucketing", Doubled())
    return passes


def decode(passes: PassPlanner, num_blocks: int) -> Bucket:
    (one,) = passes.passes(plan([4 * num_blocks - 1], [1]), TABLES)
    return one.bucket


def test_hits_and_fallbacks_are_counted_for_each_plan() -> None:
    passes = doubling()
    passes.cover((SMALL, MIDDLING, LARGE), ())
    found = []
    for num_blocks in (3, 5, 17):
        decode(passes, num_blocks)
        found.append((passes.counts.num_hits, passes.counts.num_fallbacks))
    assert found == [(1, 0), (1, 0), (0, 1)]


def test_shape_that_a_covering_bucket_takes_is_a_fallback_that_was_prepared() -> None:
    passes = doubling()
    covering = Bucket(1, 1, 40, Phase.DECODE)
    passes.prepared((SMALL, covering))
    passes.cover((SMALL,), (covering,))
    assert decode(passes, 17) == covering
    assert (passes.counts.num_fallbacks, passes.counts.num_unprepared) == (1, 0)


def test_pass_may_run_in_a_bucket_that_is_not_its_own() -> None:
    passes = doubling()
    passes.prepared((MIDDLING,))
    passes.substitute = lambda shape, bucket: MIDDLING if bucket == SMALL else bucket
    assert (decode(passes, 3), passes.counts.num_substituted, passes.counts.num_unprepared) == (MIDDLING, 1, 0)
    assert (decode(passes, 12), passes.counts.num_substituted, passes.counts.num_unprepared) == (LARGE, 0, 1)
    assert passes.ready == {MIDDLING, LARGE}
    passes.substitute = None
    assert (decode(passes, 3), passes.counts.num_substituted) == (SMALL, 0)
