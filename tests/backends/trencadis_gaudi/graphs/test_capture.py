from __future__ import annotations

import pytest

from trencadis.clock import SystemClock
from trencadis.errors import OutOfMemoryError
from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.capture import Capture, describe, log_bucket
from trencadis_gaudi.habana import load_habana

PREFILLS = [Bucket(1, query, 0) for query in (512, 256, 128)]
DECODES = [Bucket(batch, 1, 8, Phase.DECODE) for batch in (4, 2, 1)]


class Desk:
    """A device on which a graph takes a byte for each token position and block."""

    def __init__(self, total_bytes, *, margin_bytes=0, **options):
        self.config = GaudiConfig(device="emulated", emulated_memory_bytes=total_bytes, **{"mode": "lazy", **options})
        self.habana = load_habana(self.config, clock=SystemClock())
        self.ran = []
        self.done = []
        self.used = {}
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
    assert desk.capture.as_graph(PREFILLS[0])
    # A bucket made at run time is captured too: nothing bounds their number.
    assert desk.capture.as_graph(Bucket(1, 640, 0))


def test_shortage_of_memory_captures_the_smallest_first_and_says_what_is_left_out(caplog):
    desk = Desk(600)
    desk.every([*PREFILLS, *DECODES])
    captured = set(desk.capture.graphs)
    assert captured == {*PREFILLS[1:], *DECODES}
    assert (PREFILLS[0], False) in desk.ran  # compiled all the same, without a graph
    assert desk.capture.as_graph(PREFILLS[1])
    assert not desk.capture.as_graph(PREFILLS[0])
    assert not desk.capture.as_graph(Bucket(1, 640, 0))
    assert "Memory for graphs is short: capturing again, the smallest buckets first" in caplog.text
    assert "1 of 6 buckets run without a graph for lack of memory: [(1, 512, 0)]" in caplog.text
    assert set(desk.done) == {*PREFILLS, *DECODES}


def test_margin_is_never_given_away():
    desk = Desk(1000, margin_bytes=700)
    desk.every([*PREFILLS, *DECODES])
    assert desk.habana.free_bytes() >= 700
    assert set(desk.capture.graphs) == {PREFILLS[2], *DECODES}


def test_shortage_of_memory_may_be_an_error():
    desk = Desk(600, on_memory_shortage="fail")
    with pytest.raises(OutOfMemoryError, match="1 graphs take 512 B") as caught:
        desk.every([*PREFILLS, *DECODES])
    assert "graph_reserve" in caught.value.hint


def test_budget_captures_in_the_orders_of_its_strategies(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    desk = Desk(1000, margin_bytes=600, capture="budgeted", prompt_ratio=0.5)
    prompt, decode = desk.capture.budgeted(PREFILLS, DECODES)
    assert [bucket for bucket, _ in desk.ran] == [PREFILLS[2], *DECODES]
    assert (prompt.captured, decode.is_complete) == ([PREFILLS[2]], True)
    assert (
        "Using 400 B/1000 B of free device memory for HPUGraphs, 200 B for prompt and 200 B for decode" in caplog.text
    )
    assert "[Warmup][Graph/Prompt][1/3] batch_size:1 query_len:128 num_blocks:0 free_mem:872 B" in caplog.text
    assert "Graph/Prompt captured:1 (33.3%) used_mem:128 B buckets:[(1, 128, 0)]" in caplog.text
    assert "Graph/Decode captured:3 (100.0%) used_mem:31 B" in caplog.text
    assert not desk.capture.as_graph(PREFILLS[0])


def test_budget_that_pays_for_no_graph_is_an_error():
    desk = Desk(1000, margin_bytes=1000, capture="budgeted")
    with pytest.raises(OutOfMemoryError, match="do not pay for one") as caught:
        desk.capture.budgeted(PREFILLS, DECODES)
    assert "graph_reserve" in caught.value.hint


def test_nothing_is_a_graph_outside_lazy_mode():
    desk = Desk(1000, mode="compile")
    assert not desk.capture.as_graph(PREFILLS[0])


def test_unified_bucket_is_logged_with_shared_and_unique_blocks(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    log_bucket("Prompt", UnifiedBucket(2048, 256, 2890, True), 2, 375, 1025)
    assert caplog.messages == [
        "[Warmup][Unified CFG][2/375] query_len:2048 shared_blocks:256 unique_blocks:2890 (causal) free_mem:1.001 KiB"
    ]


def test_sizes_are_listed_in_order():
    assert describe([Bucket(2, 1, 8, Phase.DECODE), Bucket(1, 128, 0)]) == [(1, 128, 0), (2, 1, 8)]
