from __future__ import annotations

import logging

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis.records import Bucket, MemoryReport, Phase
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.choice import choose_mode
from trencadis_torch.graphs.compiled import CompiledMode
from trencadis_torch.graphs.counts import CaptureWatch, GraphWatch
from trencadis_torch.graphs.cuda_graphs import CudaGraphMode
from trencadis_torch.graphs.mode import BucketMode
from trencadis_torch.native_build import find_compiler

CPU = torch.device("cpu")


def chosen(**options) -> BucketMode:
    return choose_mode(TorchConfig(layout="padded", **options), device=CPU, clock=SimulatedClock())


def test_each_key_has_its_mode(tmp_path, monkeypatch):
    assert type(chosen()) is BucketMode
    assert type(chosen(graphs="checked")) is CudaGraphMode
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert type(chosen(compile="buckets")) is CompiledMode


def test_only_without_graphs_a_pass_can_wait_between_its_layers():
    assert [mode.layerwise_kv for mode in (BucketMode, CompiledMode, CudaGraphMode)] == [True, False, False]


BUCKETS = [
    *(Bucket(1, 1, 4, Phase.DECODE), Bucket(4, 1, 16, Phase.DECODE), Bucket(2, 1, 8, Phase.DECODE)),
    *(Bucket(1, 128, 0), Bucket(4, 512, 0), Bucket(1, 512, 0)),
]


def test_where_nothing_is_kept_for_a_shape_the_smallest_bucket_of_each_phase_runs_once():
    ran, progress = [], []
    report = chosen().warm_up(BUCKETS, run=ran.append, progress=lambda *done: progress.append(done))
    assert sorted(ran) == sorted([Bucket(1, 1, 4, Phase.DECODE), Bucket(1, 128, 0)])
    assert progress == [(done, len(BUCKETS)) for done in range(1, len(BUCKETS) + 1)]
    assert (report.prepared, report.num_graphs) == (tuple(BUCKETS), 0)


def test_on_a_device_that_compiles_kernels_every_bucket_runs_once_the_largest_first():
    ran = []
    mode = choose_mode(TorchConfig(layout="padded"), device=torch.device("cuda"), clock=SimulatedClock())
    assert mode.warm_up(BUCKETS, run=ran.append).prepared == tuple(BUCKETS)
    assert ran == sorted(BUCKETS, reverse=True)


def test_without_graphs_nothing_is_counted_and_no_memory_kept():
    mode = chosen()
    report = MemoryReport(total_bytes=10, free_bytes=5, activation_bytes=1)
    assert mode.reserve(report, max_num_batched_tokens=1, max_num_seqs=1, logits_bytes=1) == report
    with mode.step() as counts:
        pass
    assert counts.num_compilations == 0
    assert mode.metrics() == ""


def values(watch):
    lines = [line.split() for line in watch.metrics().splitlines() if not line.startswith("#")]
    return {name.removeprefix("trencadis_torch_"): float(value) for name, value in lines if "created" not in name}


def test_all_counts_begin_at_nothing():
    assert values(GraphWatch()) == {
        "graphs": 0,
        "graphs_from_disk": 0,
        "warmup_seconds_total": 0,
        "recompilations_total": 0,
        "eager_passes_total": 0,
    }


def test_warm_ups_and_steps_add_up(caplog):
    watch = GraphWatch()
    watch.warmed_up(num_graphs=3, num_cached=2, took_s=1.5)
    watch.warmed_up(num_graphs=1, num_cached=0, took_s=1.0)
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        watch.stepped(num_compilations=0, num_eager=2)
        assert not caplog.records
        watch.stepped(num_compilations=4, num_eager=0)
    assert [record.args for record in caplog.records] == [(4,)]
    assert values(watch) == {
        "graphs": 4,
        "graphs_from_disk": 2,
        "warmup_seconds_total": 2.5,
        "recompilations_total": 4,
        "eager_passes_total": 2,
    }


ONE, TWO = Bucket(1, 1, 4, Phase.DECODE), Bucket(2, 1, 8, Phase.DECODE)


def test_replays_are_counted_by_bucket_and_misses_are_warned_about_once(caplog):
    watch = CaptureWatch()
    watch.note(ONE, replayed=False)  # the warm-up's own pass
    watch.graphs(3, 12345)
    with caplog.at_level(logging.WARNING, logger="trencadis.torch"):
        for replayed in (True, True, False, False):
            watch.note(ONE if replayed else TWO, replayed=replayed)
    assert (watch.num_replays, watch.num_misses) == (2, 2)
    assert [record.getMessage().count("batch_size=2") for record in caplog.records] == [1]
    lines = watch.metrics().splitlines()
    assert "trencadis_torch_captured_graphs 3.0" in lines
    assert "trencadis_torch_captured_bytes 12345.0" in lines
    assert 'trencadis_torch_graph_replays_total{batch_size="1",num_blocks="4",query_len="1"} 2.0' in lines
    assert "trencadis_torch_graph_misses_total 2.0" in lines
