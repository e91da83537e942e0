from __future__ import annotations

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trencadis.records import FinishReason
from trencadis_plugins.observer.config import PrometheusObserverConfig
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_plugins.observer.vllm_names import VLLM_NAMES
from trencadis_testing.observer import finished_sequence, step_stats

LABELS = {"model_name": "sea", "engine": "0"}
DASHBOARD = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
}


@pytest.fixture
def observer():
    made = PrometheusObserver(config=PrometheusObserverConfig(model_name="sea"))
    made.on_step(
        step_stats(
            num_running=3,
            num_waiting=2,
            num_swapped=1,
            num_scheduled_tokens=24,
            num_emitted_tokens=5,
            num_prompt_tokens_admitted=20,
            num_prompt_tokens_cached=8,
            num_preempted=1,
            num_drafted_sequences=2,
            num_drafted_by_position=(2, 1, 1),
            num_accepted_by_position=(2, 1, 0),
            num_draft_tokens=4,
            num_accepted_tokens=3,
            num_used_blocks=6,
            num_cached_blocks=2,
            num_free_blocks=4,
        )
    )
    finished = attrs.evolve(
        finished_sequence(num_output_tokens=5),
        arrival_s=10.0,
        first_scheduled_s=10.5,
        first_token_s=11.0,
        finish_s=13.0,
    )
    made.on_request(finished)
    made.on_request(finished_sequence(reason=FinishReason.ABORT))
    return made


def families_of(observer):
    return {
        family.name: family
        for family in text_string_to_metric_families(observer.metrics())
        if family.name.startswith("vllm:")
    }


def test_every_metric_of_the_dashboards_is_there_with_its_type(observer):
    assert {name: family.type for name, family in families_of(observer).items()} == DASHBOARD


def test_every_sample_is_labelled_as_theirs(observer):
    for family in families_of(observer).values():
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items(), sample


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:num_requests_swapped", 1),
        ("vllm:kv_cache_usage_perc", 0.5),
        ("vllm:prefix_cache_queries_total", 20),
        ("vllm:prefix_cache_hits_total", 8),
        ("vllm:num_preemptions_total", 1),
        ("vllm:prompt_tokens_total", 20),
        ("vllm:generation_tokens_total", 5),
        ("vllm:spec_decode_num_draft_tokens_total", 4),
        ("vllm:spec_decode_num_accepted_tokens_total", 3),
        ("vllm:iteration_tokens_total_sum", 24),
        ("vllm:time_to_first_token_seconds_sum", 1.0),
        ("vllm:inter_token_latency_seconds_sum", 2.0),
        ("vllm:inter_token_latency_seconds_count", 4),
        ("vllm:request_time_per_output_token_seconds_sum", 0.5),
        ("vllm:request_time_per_output_token_seconds_count", 1),
        ("vllm:e2e_request_latency_seconds_sum", 3.0),
        ("vllm:request_queue_time_seconds_sum", 0.5),
        ("vllm:request_prefill_time_seconds_sum", 0.5),
        ("vllm:request_decode_time_seconds_sum", 2.0),
        ("vllm:request_inference_time_seconds_sum", 2.5),
    ],
)
def test_values_are_those_of_our_own_metrics(observer, name, value):
    samples = {sample.name: sample.value for family in families_of(observer).values() for sample in family.samples}
    assert samples[name] == pytest.approx(value)


def test_reasons_of_ends_are_labelled_as_theirs(observer):
    samples = families_of(observer)["vllm:request_success"].samples
    reasons = {sample.labels["finished_reason"]: sample.value for sample in samples}
    assert reasons == {"stop": 1, "abort": 1}


def test_nothing_is_used_without_blocks():
    samples = {
        sample.name: sample.value for family in families_of(PrometheusObserver()).values() for sample in family.samples
    }
    assert samples["vllm:kv_cache_usage_perc"] == 0


def test_their_names_can_be_switched_off():
    observer = PrometheusObserver(config=PrometheusObserverConfig(vllm_names=False))
    assert "vllm:" not in observer.metrics()
    assert observer.metrics() == observer.text()


def test_every_metric_of_ours_that_is_renamed_exists():
    ours = {metric.name for metric in PrometheusObserver().registry.collect()}
    assert set(VLLM_NAMES) <= ours


def test_accepted_drafts_are_counted_by_position_from_0(observer):
    samples = families_of(observer)["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert {sample.name for sample in samples} == {"vllm:spec_decode_num_accepted_tokens_per_pos_total"}
    assert {sample.labels["position"]: sample.value for sample in samples} == {"0": 2, "1": 1, "2": 0}
    assert families_of(observer)["vllm:spec_decode_num_drafts"].samples[0].value == 2
