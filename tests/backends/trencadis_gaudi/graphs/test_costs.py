from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.graphs.capture import GraphBudget, capture_order
from trencadis_gaudi.graphs.costs import GraphCosts, cost_sizes

PREFILLS = [
    Bucket(batch_size, query_len, blocks)
    for batch_size in (1, 2, 4)
    for query_len in (16, 32, 48, 64, 96, 128)
    for blocks in (0, 1, 2, 4, 7)
]
DECODES = [
    Bucket(batch_size, 1, blocks, Phase.DECODE)
    for batch_size in (1, 2, 4, 8)
    for blocks in (1, 2, 4, 6, 9, 16)
    if blocks >= batch_size
]


def taught(*pairs: tuple[Bucket, int]) -> GraphCosts:
    costs = GraphCosts()
    for bucket, num_bytes in pairs:
        costs.add(bucket, num_bytes)
    return costs


def calibrating(captured: list[Bucket]) -> set[Bucket]:
    """The graphs whose sizes are no combination of those before: a fit cannot know what they take."""
    sizes = np.array([cost_sizes(bucket) for bucket in captured], float).reshape(-1, 6)
    sizes /= np.maximum(sizes.max(axis=0, initial=0), 1)
    ranks = [np.linalg.matrix_rank(sizes[: count + 1]) for count in range(len(captured))]
    return {bucket for bucket, rank, before in zip(captured, ranks, [0, *ranks], strict=False) if rank > before}


def test_nothing_is_expected_before_the_first_graph() -> None:
    assert GraphCosts().estimate(Bucket(1, 128, 4)) == 0


def test_one_graph_makes_an_estimate_in_proportion_to_tokens() -> None:
    assert taught((Bucket(1, 128, 0), 1000)).estimate(Bucket(2, 256, 0)) == pytest.approx(4000)


def test_context_counts_as_soon_as_two_graphs_differ_in_it() -> None:
    costs = taught((Bucket(1, 128, 0), 1000), (Bucket(1, 128, 1), 1500))
    assert costs.estimate(Bucket(1, 128, 8)) == pytest.approx(5000)


def test_sizes_of_a_unified_bucket_have_its_unique_blocks() -> None:
    assert cost_sizes(UnifiedBucket(32, 3, 40, is_causal=False))[1] == 43
    assert cost_sizes(Bucket(2, 128, 3))[:3] == (256, 6, 768)


def test_estimate_is_raised_by_the_worst_error_where_no_fit_is_exact() -> None:
    """Memory in steps, as a device's allocator has it."""
    pairs = [(bucket, -(-bucket.num_tokens // 64) * 4096) for bucket in PREFILLS if not bucket.num_blocks]
    costs = taught(*pairs)
    assert all(costs.estimate(bucket) >= num_bytes * (1 - 1e-9) for bucket, num_bytes in pairs)


weights = st.lists(st.integers(0, 5000), min_size=6, max_size=6)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(weights=weights, buckets=st.permutations(PREFILLS), count=st.integers(1, 30))
def test_estimate_is_exact_for_what_the_captured_graphs_span(weights, buckets, count) -> None:
    true = {bucket: 1 + int(np.dot(weights, cost_sizes(bucket))) for bucket in buckets}
    captured = buckets[:count]
    costs = taught(*((bucket, true[bucket]) for bucket in captured))
    for bucket in buckets[count:]:
        if bucket not in calibrating([*captured, bucket]):
            assert costs.estimate(bucket) == pytest.approx(true[bucket], rel=1e-3)


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None)
@given(prefill=weights, decode=weights, share=st.floats(0.02, 1.1), ratio=st.floats(0, 1))
def test_budget_is_exceeded_by_no_more_than_the_graphs_that_calibrate_it(prefill, decode, share, ratio) -> None:
    """On a device whose graphs take more with context, in every proportion of tokens, blocks, their products and sequences."""
    of_phase = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    true = {bucket: 1 + int(np.dot(of_phase[bucket.phase], cost_sizes(bucket))) for bucket in (*PREFILLS, *DECODES)}
    budget = int(share * sum(true.values()))
    orders = capture_order(PREFILLS, "min_tokens"), capture_order(DECODES, "max_bs")
    reports = GraphBudget(budget, prompt_ratio=ratio, capture=lambda bucket, _: true[bucket]).run(*orders)
    used = sum(report.used_bytes for report in reports)
    teachers = [calibrating(report.captured) for report in reports]
    assert all(len(found) <= 6 for found in teachers)
    # One graph of each phase ends its rounds; estimates have a relative tolerance.
    assert used <= budget * 1.001 + sum(max(map(true.__getitem__, found), default=0) for found in teachers)
