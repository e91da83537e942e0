from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trencadis.records import TransferCause
from trencadis_kv.store.counters import TransferCounters


def test_counts_are_told_in_prometheus_text_with_the_connectors_name():
    counters = TransferCounters("shelf")
    counters.looked_up("hit")
    counters.failed(TransferCause.CORRUPT)
    counters.moved("load", num_tokens=8, num_bytes=100)
    counters.moved("load", num_tokens=4, num_bytes=60)
    counters.dropped("staging", 3)
    counters.answered(0.02)
    counters.ended(0.2)
    counters.watch(breaker_state=lambda: 2.0, staged_bytes=lambda: 7.0)
    samples = [sample for family in text_string_to_metric_families(counters.text()) for sample in family.samples]
    found = {(s.name, *sorted(v for k, v in s.labels.items() if k != "connector")): s.value for s in samples}
    assert all(sample.labels["connector"] == "shelf" for sample in samples)
    expected = {
        ("trencadis_kv_lookups_total", "hit"): 1,
        ("trencadis_kv_transfer_failures_total", "corrupt"): 1,
        ("trencadis_kv_tokens_total", "load"): 12,
        ("trencadis_kv_bytes_total", "load"): 160,
        ("trencadis_kv_dropped_saves_total", "staging"): 3,
        ("trencadis_kv_lookup_seconds_sum",): 0.02,
        ("trencadis_kv_load_seconds_count",): 1,
        ("trencadis_kv_breaker_state",): 2,
        ("trencadis_kv_staged_bytes",): 7,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_two_connectors_of_one_name_count_apart():
    first, second = TransferCounters("shelf"), TransferCounters("shelf")
    first.looked_up("hit")
    assert first.value("lookups_total", result="hit") == 1
    assert second.value("lookups_total", result="hit") == 0
