from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.records import Bucket, Phase, Shape
from trencadis_gallery.bucketing.fitted_problem import Problem, decode_problem, prefill_problem
from trencadis_gallery.bucketing.workloads import DeviceCost, Passes, Workload
from trencadis_testing.bucketing import SAMPLE_LIMITS, legal_shapes

COST = DeviceCost()
LIMITS = attrs.evolve(SAMPLE_LIMITS["long_context"], max_model_len=1024, max_num_batched_tokens=1024)


def ran(*shapes):
    return Workload(tuple(Passes(shape, 1, shape.num_tokens) for shape in shapes))


def decode(batch_size, num_blocks, query_len=1):
    return Shape(batch_size, query_len, num_blocks, Phase.DECODE)


def tops(problem: Problem):
    return list(problem.candidates[: problem.num_tops])


@pytest.mark.parametrize("limits", SAMPLE_LIMITS.values(), ids=SAMPLE_LIMITS.keys())
def test_largest_buckets_cover_every_shape_within_the_budget(limits):
    shapes = legal_shapes(limits)
    largest = tops(prefill_problem(ran(), limits, COST)) + tops(decode_problem(ran(), limits, COST, 0.0))
    read = 3 * limits.num_blocks
    for shape in shapes:
        beyond = (
            shape.num_blocks > read if shape.phase is Phase.DECODE else shape.num_tokens > limits.max_num_batched_tokens
        )
        assert beyond or any(bucket.covers(shape) for bucket in largest), shape


@pytest.mark.parametrize("limits", SAMPLE_LIMITS.values(), ids=SAMPLE_LIMITS.keys())
def test_every_point_is_covered_by_a_largest_bucket(limits):
    workload = ran(*sorted(legal_shapes(limits)))
    for problem in (prefill_problem(workload, limits, COST), decode_problem(workload, limits, COST, 0.1)):
        assert problem.covers[: problem.num_tops].any(axis=0).all()
        assert len(problem.weights)


def test_several_prompts_share_the_token_budget():
    limits = attrs.evolve(LIMITS, max_prefill_batch_size=4, max_num_seqs=4, max_num_batched_tokens=2048)
    largest = tops(prefill_problem(ran(), limits, COST))
    assert largest == [Bucket(4, 512, 8), Bucket(3, 682, 8), Bucket(2, 1024, 8)]


def test_query_lengths_are_whole_blocks():
    problem = prefill_problem(ran(Shape(1, 100, 0), Shape(1, 129, 0), Shape(1, 256, 0)), LIMITS, COST)
    assert sorted(problem.candidates) == [Bucket(1, 128, 0), Bucket(1, 256, 0), Bucket(1, 1024, 8)]
    assert problem.weights.tolist() == [1.0, 2.0]
    assert problem.is_line


def test_candidates_are_combinations_within_the_token_budget():
    limits = attrs.evolve(LIMITS, max_prefill_batch_size=4, max_num_batched_tokens=1024)
    problem = prefill_problem(ran(Shape(1, 900, 3), Shape(4, 200, 0)), limits, COST)
    assert {bucket.batch_size * bucket.query_len <= 1024 for bucket in problem.candidates} == {True}
    assert Bucket(1, 256, 3) in problem.candidates
    assert not problem.is_line


@pytest.mark.parametrize("shape", [Shape(1, 1025, 0), Shape(1, 100, 9), Shape(2, 100, 0)])
def test_prefill_beyond_the_limits_is_left_out(shape):
    assert not len(prefill_problem(ran(shape), LIMITS, COST).weights)


@pytest.mark.parametrize("shape", [decode(17, 20), decode(1, 9), decode(16, 129), decode(2, 4, query_len=2)])
def test_decode_beyond_the_limits_is_left_out(shape):
    assert not len(decode_problem(ran(shape), LIMITS, COST, 0.1).weights)


def test_decode_blocks_end_at_three_times_the_cache():
    small = attrs.evolve(LIMITS, num_blocks=20)
    assert tops(decode_problem(ran(), small, COST, 0.0)) == [Bucket(16, 1, 60, Phase.DECODE)]
    assert tops(decode_problem(ran(), LIMITS, COST, 0.0)) == [Bucket(16, 1, 128, Phase.DECODE)]
    contiguous = attrs.evolve(small, contiguous=True)
    assert tops(decode_problem(ran(), contiguous, COST, 0.0)) == [Bucket(16, 1, 20, Phase.DECODE)]


def test_drafts_are_the_longest_or_none():
    limits = attrs.evolve(LIMITS, max_draft_tokens=3)
    problem = decode_problem(ran(decode(2, 4, query_len=2), decode(2, 4)), limits, COST, 0.0)
    assert {bucket.query_len for bucket in problem.candidates} == {1, 4}


def test_reserve_has_its_share_of_the_weight_over_sequences_and_blocks_that_did_not_run():
    without = decode_problem(ran(decode(2, 4)), LIMITS, COST, 0.0)
    problem = decode_problem(ran(decode(2, 4)), LIMITS, COST, 0.5)
    assert without.weights.sum() == 1.0
    assert problem.weights.sum() == pytest.approx(1.5)
    assert {bucket.batch_size for bucket in problem.candidates} == {1, 2, 4, 8, 16}


def test_no_decode_candidate_has_more_blocks_than_its_sequences_or_fewer():
    problem = decode_problem(ran(decode(2, 4), decode(16, 100)), LIMITS, COST, 0.1)
    assert all(item.batch_size <= item.num_blocks <= 8 * item.batch_size for item in problem.candidates)


def test_many_sizes_are_thinned_and_every_shape_still_covered():
    rng = np.random.default_rng(0)
    limits = attrs.evolve(LIMITS, max_model_len=65536, num_blocks=9000)
    shapes = {
        decode(int(b), int(b * n)) for b, n in zip(rng.integers(1, 17, 2000), rng.integers(1, 500, 2000), strict=True)
    }
    problem = decode_problem(ran(*sorted(shapes)), limits, COST, 0.0)
    assert len({bucket.num_blocks for bucket in problem.candidates}) < 400
    assert len(problem.candidates) < 700
    assert problem.weights.sum() == len(shapes)
    assert problem.covers[0].all()


def test_full_tables_of_few_sequences_keep_a_candidate_of_their_own():
    """Thinned block counts lie above what the sequences can have; such a candidate is cut, and so is the shape."""
    limits = attrs.evolve(LIMITS, max_num_seqs=100, num_blocks=9000)
    problem = decode_problem(ran(*(decode(size, 8 * size) for size in range(1, 101))), limits, COST, 0.0)
    smaller = [place for place, bucket in enumerate(problem.candidates) if bucket.batch_size < 100]
    # Of 35 points two belong to the largest batch, which nothing smaller covers.
    assert problem.covers[smaller].any(axis=0).sum() == len(problem.weights) - 2


def test_times_and_memory_are_those_of_the_estimates():
    problem = prefill_problem(ran(Shape(1, 100, 0)), LIMITS, COST)
    assert problem.times.tolist() == [COST.pass_s(bucket) for bucket in problem.candidates]
    assert problem.bytes.tolist() == [COST.graph_bytes(bucket) for bucket in problem.candidates]
