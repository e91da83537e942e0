from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trencadis_kv.connectors.tiered.child import TierCounters, merged

NEAR = """# HELP trencadis_kv_lookups_total Look-ups.
# TYPE trencadis_kv_lookups_total counter
trencadis_kv_lookups_total{connector="a",result="hit"} 3.0
# HELP trencadis_kv_load_seconds Loads.
# TYPE trencadis_kv_load_seconds histogram
trencadis_kv_load_seconds_bucket{le="1.0"} 2.0
trencadis_kv_load_seconds_bucket{le="+Inf"} 2.0
trencadis_kv_load_seconds_count 2.0
trencadis_kv_load_seconds_sum 0.5
"""
FAR = NEAR.replace("3.0", "7.0").replace('connector="a",', "")


def _samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_children_with_the_same_metrics_are_told_apart_by_a_label():
    text = merged({"near": NEAR, "far": FAR, "silent": ""})
    samples = _samples(text)
    assert samples[("trencadis_kv_lookups_total", ("connector", "a"), ("result", "hit"), ("tier", "near"))] == 3.0
    assert samples[("trencadis_kv_lookups_total", ("result", "hit"), ("tier", "far"))] == 7.0
    assert samples[("trencadis_kv_load_seconds_bucket", ("le", "1.0"), ("tier", "far"))] == 2.0
    assert len(samples) == len(_samples(NEAR)) + len(_samples(FAR))
    assert text.count("# TYPE trencadis_kv_lookups_total counter") == 1
    assert text.count("# HELP trencadis_kv_load_seconds ") == 1


def test_a_text_that_cannot_be_read_is_left_out_with_a_warning(caplog):
    text = merged({"near": NEAR, "broken": "trencadis{ 1 2 3 what"})
    assert len(_samples(text)) == len(_samples(NEAR))
    assert "The metrics of the KV connector broken cannot be read." in caplog.text


def test_counters_are_shown_by_tier():
    counters = TierCounters()
    counters.watch("near", lambda: 2.0)
    counters.looked_up("near", "hit")
    counters.looked_up("near", "hit")
    counters.ended("near", "failed")
    counters.promoted("near", 5)
    assert counters.value("lookups_total", tier="near", result="hit") == 2
    assert counters.value("lookups_total", tier="near", result="miss") == 0
    samples = _samples(counters.text())
    assert samples[("trencadis_kv_tier_loads_total", ("result", "failed"), ("tier", "near"))] == 1
    assert samples[("trencadis_kv_tier_promoted_blocks_total", ("tier", "near"))] == 5
    assert samples[("trencadis_kv_tier_state", ("tier", "near"))] == 2
