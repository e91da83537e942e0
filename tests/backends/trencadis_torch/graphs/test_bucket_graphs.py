from __future__ import annotations

import graph_scene
import pytest
import tiny_models
import torch
from graph_scene import DRAFTS, PASSES, SINGLE

from trencadis.errors import BackendError
from trencadis.records import Bucket, Phase
from trencadis_torch.graphs.bucket_graphs import MARGIN_BYTES
from trencadis_torch.graphs.capture import Recorder

SMALL = Bucket(1, 1, 4, Phase.DECODE)


class Scripted(Recorder):
    """Notes what is asked for; its graphs run Python again, spoilt or not."""

    def __init__(self, *, free_bytes=10**12, needs=None, offset=0.0):
        self.captured, self.closed = [], False
        self._free, self._needs, self._offset = free_bytes, needs or {}, offset

    def rehearse(self, run, *, what):
        run()
        return self._needs.get(what, 0)

    def capture(self, run, *, what):
        self.captured.append(what)
        self._free -= 1000
        recorder = self

        class Graph:
            def replay(self):
                run()
                for logits in recorder.lasting[1:]:
                    logits.add_(recorder._offset)

        return Graph()

    def free_bytes(self):
        return self._free

    def lasts(self, *tensors):
        self.lasting = tensors

    def close(self):
        self.closed = True


def test_largest_is_captured_first_and_each_shape_once():
    recorder = Scripted()
    scene = graph_scene.make(recorder=recorder)
    ran = []
    with torch.inference_mode():
        report = scene.graphed.graphs.warm_up([SMALL, DRAFTS, Bucket(1, 8, 2), SINGLE], run=ran.append)
    assert recorder.captured == [f"a decode of {size} tokens" for size in ("2 × 3", "4 × 1", "1 × 1")]
    assert ran == [Bucket(1, 8, 2), DRAFTS, SINGLE, SMALL]
    assert (report.num_graphs, report.graph_bytes, set(report.prepared)) == (3, 3000, set(ran))
    scene.warm_up(SINGLE)
    assert len(recorder.captured) == 3


def test_shape_without_room_runs_without_a_graph_and_smaller_ones_have_theirs(caplog):
    needs = {"a decode of 2 × 3 tokens": 101, "a decode of 4 × 1 tokens": 100}
    recorder = Scripted(free_bytes=MARGIN_BYTES + 100, needs=needs)
    scene = graph_scene.make(recorder=recorder)
    report = scene.warm_up(SINGLE, DRAFTS)
    assert recorder.captured == ["a decode of 4 × 1 tokens"]
    assert (report.num_graphs, set(report.prepared)) == (1, {SINGLE, DRAFTS})
    assert "2 × 3 tokens runs without a graph" in caplog.text
    assert scene.graphed.graphs.find(DRAFTS) is None


def test_nothing_is_captured_after_the_warm_up():
    recorder = Scripted()
    scene = graph_scene.make(recorder=recorder)
    scene.warm_up(SMALL)
    before = list(recorder.captured)
    for one in PASSES:
        scene.logits(scene.graphed, one)
    assert recorder.captured == before
    assert scene.watch.num_misses == len(PASSES)


def test_warm_up_leaves_no_trace_in_rows_and_cache():
    scene = graph_scene.make()
    before = [part[:-1].clone() for part in (*scene.cache.parts, scene.rows.tokens, scene.rows.tables)]
    scene.warm_up(SINGLE, DRAFTS)
    after = [part[:-1] for part in (*scene.cache.parts, scene.rows.tokens, scene.rows.tables)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_graph_that_computes_something_else_is_refused():
    scene = graph_scene.make(recorder=Scripted(offset=0.5))
    with pytest.raises(BackendError, match="4 × 1 tokens computes other logits"):
        scene.warm_up(SINGLE)


def test_model_that_asks_the_host_is_refused_by_name():
    model = tiny_models.make_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output * float(output.sum() > 0))
    scene = graph_scene.make(model=model)
    with pytest.raises(BackendError, match=r"4 × 1 tokens cannot be captured: .*to the host") as caught:
        scene.warm_up(SINGLE)
    assert 'graphs = "off"' in caught.value.hint


def test_closing_lets_go_of_graphs_and_recorder():
    recorder = Scripted()
    scene = graph_scene.make(recorder=recorder)
    scene.warm_up(SINGLE)
    scene.graphed.graphs.close()
    assert recorder.closed
    assert scene.graphed.graphs.find(SINGLE) is None
