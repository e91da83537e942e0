from __future__ import annotations

import logging

from trencadis_torch.graphs.compiled_counts import GraphWatch


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
