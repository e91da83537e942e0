from __future__ import annotations

import graph_scene
import pytest
import torch
from graph_scene import DRAFTS, SINGLE

from trencadis.errors import BackendError
from trencadis.records import MemoryReport
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.cuda_graph_mode import CaptureMode


def made(graphs="checked", device="cpu") -> CaptureMode:
    return CaptureMode(TorchConfig(graphs=graphs, layout="padded"), device=torch.device(device))


@pytest.mark.parametrize(("graphs", "device"), [("buckets", "cpu"), ("checked", "cuda:0")])
def test_device_that_does_not_capture_so_is_refused(graphs, device):
    with pytest.raises(BackendError, match=f'graphs = "{graphs}".*{device}'):
        made(graphs, device)


def test_device_that_does_is_not():
    made("buckets", "cuda:0")
    made("checked", "cpu")


def test_memory_for_graphs_is_kept_beside_that_of_steps():
    report = MemoryReport(total_bytes=10**9, free_bytes=10**9, activation_bytes=1000)
    found = made().reserve(report, max_num_batched_tokens=100, max_num_seqs=10, logits_bytes=50)
    # A tenth of the temporaries, logits twice, and four graphs for each of 1, 2, 4 and 8.
    assert found.activation_bytes == 1000 + 100 + 100 + 16 * 2 * 2**20
    assert found.free_bytes == report.free_bytes


def test_a_warm_up_before_there_is_a_runner_is_an_error():
    with pytest.raises(BackendError, match="after allocate"):
        made().warm_up([SINGLE], run=lambda bucket: None)


@torch.inference_mode()
def test_decodes_are_captured_and_counted_until_it_is_closed():
    scene, mode = graph_scene.make(), made()
    runner = mode.make_runner(scene.model, rows=scene.rows, cache=scene.cache, check=None)
    ran = []
    assert mode.warm_up([DRAFTS, SINGLE], run=ran.append).num_graphs == 2
    assert set(ran) == {SINGLE, DRAFTS}
    assert "trencadis_torch_captured_graphs 2.0" in mode.metrics()
    assert runner.graphs.find(SINGLE) is not None
    mode.close()
    mode.close()
    assert runner.graphs.find(SINGLE) is None
    assert "trencadis_torch_captured_graphs 2.0" in mode.metrics()
