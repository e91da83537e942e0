from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis_kv.connectors.p2p.metrics import P2PMetrics
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peers import Peers
from trencadis_kv.connectors.p2p.remote_prefills import Holds


def test_text_is_what_prometheus_reads_and_shows_what_there_is_now() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    clock = SimulatedClock()
    holds, peers = Holds(clock, lease_s=1, max_hold_s=1, max_bytes=100), Peers((), clock, retry_s=5)
    metrics = P2PMetrics(holds, peers)
    holds.add(1, "a", {}, num_bytes=64)
    holds.add(2, "b", {}, num_bytes=64)
    prefix = RemotePrefix(engine="e", hold_id="t", host="h", port=1, num_tokens=0, lease_s=1)
    peers.failed(prefix, TransferError("?", cause="unreachable"))
    metrics.looked_up("hit")
    metrics.failed("corrupt")
    metrics.moved("send", num_tokens=16, num_bytes=2**40 + 1)
    samples = {
        (sample.name, *sorted(value for value in sample.labels.values() if value != "p2p")): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples == {
        ("trencadis_kv_lookups_total", "hit"): 1,
        ("trencadis_kv_transfer_failures_total", "corrupt"): 1,
        ("trencadis_kv_tokens_total", "send"): 16,
        ("trencadis_kv_bytes_total", "send"): 2**40 + 1,
        ("trencadis_kv_holds_total", "refused"): 1,
        ("trencadis_kv_held_prefills",): 1,
        ("trencadis_kv_held_bytes",): 64,
        ("trencadis_kv_peers_down",): 1,
    }


def test_prompts_that_travel_are_counted_by_their_fate_and_shown_while_they_do() -> None:
    clock = SimulatedClock()
    holds = Holds(clock, lease_s=1.0, max_hold_s=1.0, max_bytes=1)
    metrics = P2PMetrics(holds, Peers((), clock, retry_s=1.0))
    metrics.watch_remote_prefills(lambda: 3)
    metrics.watch_delegated(lambda: 2)
    metrics.watch_engines(lambda: 1)
    metrics.count_delegated("served")
    metrics.count_delegated("served")
    assert metrics.value("delegated_prefills_total", result="served") == 2
    assert 'trencadis_kv_remote_prefills_running{connector="p2p"} 3.0' in metrics.text()
    assert 'trencadis_kv_delegated_prefills_running{connector="p2p"} 2.0' in metrics.text()
    assert 'trencadis_kv_prefill_engines{connector="p2p"} 1.0' in metrics.text()
