"""Which buckets become graphs, in which order, and what they are expected to take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.clock import SystemClock
from trencadis.errors import OutOfMemoryError
from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.capture import Capture, GraphBudget, capture_order, describe, log_bucket
from trencadis_gaudi.graphs.costs import GraphCosts, cost_sizes
from trencadis_gaudi.habana import load_habana

PREFILLS = [Bucket(1, query, 0) for query in (512, 256, 128)]
DECODES = [Bucket(batch, 1, 8, Phase.DECODE) for batch in (4, 2, 1)]
MANY_PREFILLS = [Bucket(b, q, 0) for b in (1, 2, 4) for q in range(128, 1025, 128)]
MANY_DECODES = [Bucket(b, 1, n, Phase.DECODE) for b in (1, 2, 4) for n in range(1, 17)]
"""Sizes of the vendor's published run: 24 prefills, 48 decodes."""


class Desk:
    """A device on which a graph takes a byte for each token position and block."""

    def __init__(self, total_bytes, *, margin_bytes=0, **options):
        self.config = GaudiConfig(device="emulated", emulated_memory_bytes=total_bytes, **{"mode": "lazy", **options})
        self.habana = load_habana(self.config, clock=SystemClock())
        self.ran, self.done, self.used = [], [], {}
        self.capture = Capture(self.config, self.habana, run=self.run, margin_bytes=margin_bytes, clear=self.clear)

    def run(self, bucket, graph):
        if graph:
            used = self.used | {bucket: bucket.num_tokens + bucket.num_blocks}
            self.habana.declare("graphs", sum(used.values()))
            self.used = used
        self.ran.append((bucket, graph))

    def clear(self):
        self.used = {}
        self.habana.declare("graphs", 0)

    def every(self, buckets):
        self.capture.every(buckets, done=self.done.append)


def test_every_bucket_is_captured_in_the_order_given_and_runs_as_a_graph():
    desk = Desk(2000)
    desk.every([*PREFILLS, *DECODES])
    assert desk.ran == [(bucket, True) for bucket in (*PREFILLS, *DECODES)]
    assert desk.done == [*PREFILLS, *DECODES]
    assert desk.capture.graph_bytes == 512 + 256 + 128 + 12 + 10 + 9
    # A bucket made at run time is captured too: nothing bounds their number. Outside lazy mode nothing is a graph.
    assert desk.capture.as_graph(PREFILLS[0])
    assert desk.capture.as_graph(Bucket(1, 640, 0))
    assert not Desk(1000, mode="compile").capture.as_graph(PREFILLS[0])


def test_shortage_of_memory_captures_the_smallest_first_and_says_what_is_left_out(caplog):
    desk = Desk(600)
    desk.every([*PREFILLS, *DECODES])
    assert set(desk.capture.graphs) == {*PREFILLS[1:], *DECODES}
    assert (PREFILLS[0], False) in desk.ran  # compiled all the same, without a graph
    assert [desk.capture.as_graph(one) for one in (PREFILLS[1], PREFILLS[0], Bucket(1, 640, 0))] == [True, False, False]
    assert "Memory for graphs is short: capturing again, the smallest buckets first" in caplog.text
    assert "1 of 6 buckets run without a graph for lack of memory: [(1, 512, 0)]" in caplog.text
    assert set(desk.done) == {*PREFILLS, *DECODES}


def test_margin_is_never_given_away():
    desk = Desk(1000, margin_bytes=700)
    desk.every([*PREFILLS, *DECODES])
    assert desk.habana.free_bytes() >= 700
    assert set(desk.capture.graphs) == {PREFILLS[2], *DECODES}


def test_shortage_of_memory_may_be_an_error_and_a_budget_without_room_for_a_graph_is_one():
    with pytest.raises(OutOfMemoryError, match="1 graphs take 512 B") as caught:
        Desk(600, on_memory_shortage="fail").every([*PREFILLS, *DECODES])
    assert "graph_reserve" in caught.value.hint
    with pytest.raises(OutOfMemoryError, match="do not pay for one") as caught:
        Desk(1000, margin_bytes=1000, capture="budgeted").capture.budgeted(PREFILLS, DECODES)
    assert "graph_reserve" in caught.value.hint


def test_budget_captures_in_the_orders_of_its_strategies(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    desk = Desk(1000, margin_bytes=600, capture="budgeted", prompt_ratio=0.5)
    prompt, decode = desk.capture.budgeted(PREFILLS, DECODES)
    assert [bucket for bucket, _ in desk.ran] == [PREFILLS[2], *DECODES]
    assert (prompt.captured, decode.is_complete) == ([PREFILLS[2]], True)
    for line in (
        "Using 400 B/1000 B of free device memory for HPUGraphs, 200 B for prompt and 200 B for decode",
        "[Warmup][Graph/Prompt][1/3] batch_size:1 query_len:128 num_blocks:0 free_mem:872 B",
        "Graph/Prompt captured:1 (33.3%) used_mem:128 B buckets:[(1, 128, 0)]",
        "Graph/Decode captured:3 (100.0%) used_mem:31 B",
    ):
        assert line in caplog.text
    assert not desk.capture.as_graph(PREFILLS[0])


def test_unified_bucket_is_logged_with_shared_and_unique_blocks_and_sizes_are_listed_in_order(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    log_bucket("Prompt", UnifiedBucket(2048, 256, 2890, True), 2, 375, 1025)
    assert caplog.messages == [
        "[Warmup][Unified CFG][2/375] query_len:2048 shared_blocks:256 unique_blocks:2890 (causal) free_mem:1.001 KiB"
    ]
    assert describe([Bucket(2, 1, 8, Phase.DECODE), Bucket(1, 128, 0)]) == [(1, 128, 0), (2, 1, 8)]


# ---------------------------------------------------------------------------------------------------------- budgets
def budget(total, ratio, capture):
    return GraphBudget(int(total), prompt_ratio=ratio, capture=capture)


def by_tokens(bucket, index):
    """Memory in proportion to the tokens of a prefill; a decode costs 3.4 MiB, as in the published run."""
    return int(161.9 * 2**20 / 48 if bucket.phase is Phase.DECODE else bucket.num_tokens * 1.45 * 2**20)


def test_fewest_tokens_or_the_largest_batch_come_first():
    order = [(b.batch_size, b.query_len) for b in capture_order(MANY_PREFILLS, "min_tokens")]
    assert order[:16] == [
        (1, 128), (2, 128), (1, 256), (1, 384), (4, 128), (2, 256), (1, 512), (1, 640),
        (2, 384), (1, 768), (1, 896), (4, 256), (2, 512), (1, 1024), (2, 640), (4, 384),
    ]  # fmt: skip
    order = [(b.batch_size, b.num_blocks) for b in capture_order(MANY_DECODES, "max_bs")]
    assert (order[:3], order[-1]) == ([(4, 1), (4, 2), (4, 3)], (1, 16))


def test_what_one_phase_leaves_goes_to_the_other_in_a_second_round():
    prefills, decodes = capture_order(MANY_PREFILLS, "min_tokens"), capture_order(MANY_DECODES, "max_bs")
    room = 15.85 * 2**30
    prompt, decode = budget(room, 0.5, by_tokens).run(prefills, decodes)
    assert decode.is_complete
    assert len(decode.captured) == 48
    alone, _ = budget(room / 2, 1.0, by_tokens).run(prefills, [])
    assert len(prompt.captured) > len(alone.captured)
    assert prompt.captured[: len(alone.captured)] == alone.captured
    assert prompt.used_bytes + decode.used_bytes <= room
    prompt, decode = budget(100, 0.9, lambda *_: 1).run([Bucket(1, 128, 0)], decodes)
    assert prompt.is_complete
    assert decode.captured_ratio == 1.0


def test_a_bucket_that_does_not_fit_is_left_and_later_smaller_ones_are_still_tried_by_their_place_in_the_order():
    seen = []

    def capture(bucket, index):
        seen.append(index)
        return bucket.query_len

    first, large, small = (Bucket(1, query, 0) for query in (512, 1024, 128))
    prompt, _ = budget(1000, 1.0, capture).run([first, large, small], [])
    assert (prompt.captured, prompt.is_complete, seen) == ([first, small], False, [0, 2])
    prompt, decode = budget(0, 0.5, by_tokens).run(list(MANY_PREFILLS), list(MANY_DECODES))
    assert (prompt.captured, decode.captured, prompt.captured_ratio, prompt.is_complete) == ([], [], 0.0, False)


# ------------------------------------------------------------------------------------------------------------ costs
WITH_CONTEXT = [Bucket(b, q, n) for b in (1, 2, 4) for q in (16, 32, 48, 64, 96, 128) for n in (0, 1, 2, 4, 7)]
FEW_DECODES = [Bucket(b, 1, n, Phase.DECODE) for b in (1, 2, 4, 8) for n in (1, 2, 4, 6, 9, 16) if n >= b]


def taught(*pairs):
    costs = GraphCosts()
    for bucket, num_bytes in pairs:
        costs.add(bucket, num_bytes)
    return costs


def calibrating(captured):
    """The graphs whose sizes are no combination of those before: a fit cannot know what they take."""
    sizes = np.array([cost_sizes(bucket) for bucket in captured], float).reshape(-1, 6)
    sizes /= np.maximum(sizes.max(axis=0, initial=0), 1)
    ranks = [np.linalg.matrix_rank(sizes[: count + 1]) for count in range(len(captured))]
    return {bucket for bucket, rank, before in zip(captured, ranks, [0, *ranks], strict=False) if rank > before}


def test_estimates_are_in_proportion_to_tokens_and_to_context_as_soon_as_two_graphs_differ_in_it():
    assert GraphCosts().estimate(Bucket(1, 128, 4)) == 0
    assert taught((Bucket(1, 128, 0), 1000)).estimate(Bucket(2, 256, 0)) == pytest.approx(4000)
    costs = taught((Bucket(1, 128, 0), 1000), (Bucket(1, 128, 1), 1500))
    assert costs.estimate(Bucket(1, 128, 8)) == pytest.approx(5000)
    assert cost_sizes(UnifiedBucket(32, 3, 40, is_causal=False))[1] == 43
    assert cost_sizes(Bucket(2, 128, 3))[:3] == (256, 6, 768)


def test_estimate_is_raised_by_the_worst_error_where_no_fit_is_exact():
    """Memory in steps, as a device's allocator has it."""
    pairs = [(bucket, -(-bucket.num_tokens // 64) * 4096) for bucket in WITH_CONTEXT if not bucket.num_blocks]
    costs = taught(*pairs)
    assert all(costs.estimate(bucket) >= num_bytes * (1 - 1e-9) for bucket, num_bytes in pairs)


weights = st.lists(st.integers(0, 5000), min_size=6, max_size=6)


@settings(max_examples=60)
@given(weights=weights, buckets=st.permutations(WITH_CONTEXT), count=st.integers(1, 30))
def test_estimate_is_exact_for_what_the_captured_graphs_span(weights, buckets, count):
    true = {bucket: 1 + int(np.dot(weights, cost_sizes(bucket))) for bucket in buckets}
    captured = buckets[:count]
    costs = taught(*((bucket, true[bucket]) for bucket in captured))
    for bucket in buckets[count:]:
        if bucket not in calibrating([*captured, bucket]):
            assert costs.estimate(bucket) == pytest.approx(true[bucket], rel=1e-3)


@pytest.mark.slow
@settings(max_examples=60)
@given(prefill=weights, decode=weights, share=st.floats(0.02, 1.1), ratio=st.floats(0, 1))
def test_budget_is_exceeded_by_no_more_than_the_graphs_that_calibrate_it(prefill, decode, share, ratio):
    """On a device whose graphs take more with context, in every proportion of tokens, blocks, their products and sequences."""
    of_phase = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    true = {one: 1 + int(np.dot(of_phase[one.phase], cost_sizes(one))) for one in (*WITH_CONTEXT, *FEW_DECODES)}
    room = int(share * sum(true.values()))
    orders = capture_order(WITH_CONTEXT, "min_tokens"), capture_order(FEW_DECODES, "max_bs")
    reports = budget(room, ratio, lambda bucket, _: true[bucket]).run(*orders)
    teachers = [calibrating(report.captured) for report in reports]
    assert all(len(found) <= 6 for found in teachers)
    # One graph of each phase ends its rounds; estimates have a relative tolerance.
    most = room * 1.001 + sum(max(map(true.__getitem__, found), default=0) for found in teachers)
    assert sum(report.used_bytes for report in reports) <= most
