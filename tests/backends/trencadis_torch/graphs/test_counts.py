from __future__ import annotations

import logging

from trencadis.records import Bucket, Phase
from trencadis_torch.graphs.counts import CaptureWatch, GraphWatch


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
