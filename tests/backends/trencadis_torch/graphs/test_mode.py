from __future__ import annotations

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis.records import Bucket, MemoryReport, Phase
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.choice import choose_mode
from trencadis_torch.graphs.compiled import CompiledMode
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
