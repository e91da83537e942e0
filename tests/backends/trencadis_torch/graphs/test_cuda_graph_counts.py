from __future__ import annotations

import logging

from trencadis.records import Bucket, Phase
from trencadis_torch.graphs.cuda_graph_counts import CaptureWatch

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
