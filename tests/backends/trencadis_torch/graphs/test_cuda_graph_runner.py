from __future__ import annotations

import graph_scene
import pytest
import tiny_models
import torch
from graph_scene import DRAFTS, PASSES, SINGLE, one_pass

from trencadis.records import Bucket, Phase
from trencadis_torch.graphs.bucket_graphs import GraphInputs
from trencadis_torch.graphs.cuda_graph_runner import lasting_tensors


@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_replays_compute_what_eager_passes_do_bit_for_bit(kind):
    """The tape that replays them makes nonsense of everything that a graph did not write itself, and runs no Python."""
    scene = graph_scene.make(kind)
    scene.warm_up(SINGLE, DRAFTS)
    for one in PASSES:
        assert isinstance(scene.graphed.inputs(one), GraphInputs)
        assert torch.equal(scene.logits(scene.graphed, one), scene.logits(scene.plain, one))
    assert (scene.watch.num_replays, scene.watch.num_misses) == (2 * len(PASSES), 0)


def test_kernel_replays_the_same_from_its_block_tables():
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
    from trencadis_torch.attention.triton import TritonAttention, obstacle

    scene = graph_scene.make("gemma2")
    if obstacle(scene.cache.layers, graph_scene.CPU) is not None:
        pytest.skip("TRITON_INTERPRET is 0: kernels are compiled for a GPU")
    kernel = scene.cache.kernel = TritonAttention(8)
    report = scene.warm_up(SINGLE, DRAFTS, Bucket(4, 1, 20, Phase.DECODE))
    assert report.num_graphs == 2  # how many blocks there are is no shape
    for one in PASSES[1:3]:
        found = scene.logits(scene.graphed, one)
        scene.cache.kernel = None
        torch.testing.assert_close(found, scene.logits(scene.plain, one), atol=1e-4, rtol=1e-4)
        scene.cache.kernel = kernel


def test_prefills_and_buckets_without_a_graph_run_as_they_are():
    scene = graph_scene.make()
    scene.warm_up(SINGLE)
    for one in (one_pass(Bucket(1, 6, 0), (1,), (0,), (6,)), PASSES[1]):
        assert not isinstance(scene.graphed.inputs(one), GraphInputs)
        assert torch.equal(scene.logits(scene.graphed, one), scene.logits(scene.plain, one))
    assert scene.watch.num_misses == 2  # the prefill is none


def test_what_outlives_graphs_is_parameters_cache_and_rows():
    scene = graph_scene.make("gemma3")
    places = {one.data_ptr() for one in lasting_tensors(scene.model, scene.rows, scene.cache)}
    expected = [
        *scene.model.parameters(),
        *scene.model.buffers(),
        *scene.cache.parts,
        scene.rows.tokens,
        scene.rows.tables,
    ]
    assert {one.data_ptr() for one in expected} <= places
