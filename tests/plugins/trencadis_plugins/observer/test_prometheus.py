from __future__ import annotations

import attrs
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from trencadis.records import FinishReason
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.observer import ObserverConformance, finished_sequence, step_stats


class TestPrometheusObserver(ObserverConformance):
    make = PrometheusObserver


def served(**times):
    return attrs.evolve(finished_sequence(num_output_tokens=5), arrival_s=10.0, first_scheduled_s=10.5, **times)


@pytest.mark.parametrize(
    ("field", "sample"),
    [
        ("num_scheduled_tokens", "trencadis_scheduled_tokens_total"),
        ("num_padded_tokens", "trencadis_padded_tokens_total"),
        ("num_emitted_tokens", "trencadis_output_tokens_total"),
        ("num_prompt_tokens_admitted", "trencadis_prompt_tokens_total"),
        ("num_prompt_tokens_cached", "trencadis_prompt_tokens_cached_total"),
        ("num_recomputed_tokens", "trencadis_recomputed_tokens_total"),
        ("num_draft_tokens", "trencadis_draft_tokens_total"),
        ("num_accepted_tokens", "trencadis_accepted_tokens_total"),
        ("num_drafted_sequences", "trencadis_drafted_sequences_total"),
        ("draft_s", "trencadis_draft_seconds_total"),
        ("num_preempted", "trencadis_preemptions_total"),
        ("num_compilations", "trencadis_compilations_total"),
        ("num_bucket_hits", "trencadis_bucket_hits_total"),
        ("num_fallbacks", "trencadis_bucket_fallbacks_total"),
        ("num_substituted", "trencadis_bucket_substitutions_total"),
        ("num_unprepared", "trencadis_unprepared_buckets_total"),
        ("num_block_swaps", "trencadis_block_swaps_total"),
    ],
)
def test_counter_adds_up_over_steps(field, sample):
    observer = PrometheusObserver()
    assert observer.snapshot()[sample] == 0
    observer.on_step(step_stats(**{field: 3}))
    observer.on_step(step_stats(**{field: 4}))
    assert observer.snapshot()[sample] == 7


@pytest.mark.parametrize(
    ("field", "sample"),
    [
        ("num_running", "trencadis_running_sequences"),
        ("num_waiting", "trencadis_waiting_sequences"),
        ("num_free_blocks", "trencadis_free_blocks"),
        ("num_cached_blocks", "trencadis_cached_blocks"),
        ("num_used_blocks", "trencadis_used_blocks"),
        ("num_drafters_quarantined", "trencadis_quarantined_drafters"),
    ],
)
def test_gauge_shows_the_last_step(field, sample):
    observer = PrometheusObserver()
    observer.on_step(step_stats(**{field: 9}))
    observer.on_step(step_stats(**{field: 4}))
    assert observer.snapshot()[sample] == 4


@pytest.mark.parametrize(
    ("field", "sample"),
    [
        ("plan_s", "trencadis_step_plan_seconds"),
        ("device_s", "trencadis_step_device_seconds"),
        ("commit_s", "trencadis_step_commit_seconds"),
    ],
)
def test_times_of_a_step_are_spread_over_a_histogram(field, sample):
    observer = PrometheusObserver()
    observer.on_step(step_stats(**{field: 0.004}))
    observer.on_step(step_stats(**{field: 3.0}))
    samples = observer.snapshot()
    assert samples[f"{sample}_sum"] == pytest.approx(3.004)
    assert [samples[f'{sample}_bucket{{le="{le}"}}'] for le in ("0.0025", "0.005", "2.5", "+Inf")] == [0, 1, 1, 2]


def test_steps_are_counted():
    observer = PrometheusObserver()
    for _ in range(3):
        observer.on_step(step_stats())
    assert observer.snapshot()["trencadis_steps_total"] == 3


def test_padding_and_recomputing_are_shares_of_all_steps():
    observer = PrometheusObserver()
    observer.on_step(step_stats(num_scheduled_tokens=20, num_padded_tokens=20))
    observer.on_step(step_stats(num_scheduled_tokens=20, num_padded_tokens=60, num_recomputed_tokens=10))
    samples = observer.snapshot()
    assert samples["trencadis_padding_ratio"] == 0.5
    assert samples["trencadis_recompute_ratio"] == 0.25


def test_latencies_of_a_served_sequence():
    observer = PrometheusObserver()
    observer.on_request(served(first_token_s=11.0, finish_s=13.0))
    samples = observer.snapshot()
    sums = {
        name: samples[f"trencadis_{name}_seconds_sum"]
        for name in ("queue", "time_to_first_token", "time_per_output_token", "end_to_end")
    }
    assert sums == {"queue": 0.5, "time_to_first_token": 1.0, "time_per_output_token": 0.5, "end_to_end": 3.0}


def test_sequence_of_one_token_has_no_time_per_token():
    observer = PrometheusObserver()
    finished = attrs.evolve(finished_sequence(num_output_tokens=1), first_token_s=1.0, finish_s=1.0)
    observer.on_request(finished)
    assert observer.snapshot()["trencadis_time_per_output_token_seconds_count"] == 0
    assert observer.snapshot()["trencadis_time_to_first_token_seconds_count"] == 1


@pytest.mark.parametrize(
    ("reason", "num_timed"),
    [(FinishReason.STOP, 1), (FinishReason.LENGTH, 1), (FinishReason.ABORT, 0), (FinishReason.ERROR, 0)],
)
def test_every_reason_is_counted_but_only_completed_sequences_are_timed_to_the_end(reason, num_timed):
    observer = PrometheusObserver()
    observer.on_request(finished_sequence(reason=reason))
    samples = observer.snapshot()
    assert samples[f'trencadis_finished_sequences_total{{finish_reason="{reason.value}"}}'] == 1
    assert samples["trencadis_end_to_end_seconds_count"] == num_timed
    assert samples["trencadis_queue_seconds_count"] == 0
    assert samples["trencadis_time_to_first_token_seconds_count"] == 0


def test_text_is_what_a_prometheus_server_reads():
    observer = PrometheusObserver()
    observer.on_step(step_stats(num_emitted_tokens=5))
    observer.on_request(served(first_token_s=11.0, finish_s=13.0))
    families = list(text_string_to_metric_families(observer.text()))
    read = {
        sample.name + ("{" + ",".join(f'{k}="{v}"' for k, v in sample.labels.items()) + "}" if sample.labels else ""):
        sample.value
        for family in families
        for sample in family.samples
    }  # fmt: skip
    assert read == observer.snapshot()
    assert read["trencadis_output_tokens_total"] == 5
    assert all(family.documentation.endswith(".") for family in families if not family.name.endswith("_created"))
    assert all(family.name.startswith("trencadis_") for family in families)


def test_the_policy_in_force_is_the_one_with_a_one():
    observer = PrometheusObserver()
    for policy in ("fcfs", "fcfs", "priority"):
        observer.on_step(step_stats(policy=policy, num_shadow_steps=1, shadow_displacement=1.5))
    snapshot = observer.snapshot()
    policies = {name: value for name, value in snapshot.items() if "scheduling_policy" in name}
    assert policies == {
        'trencadis_scheduling_policy{policy="fcfs"}': 0,
        'trencadis_scheduling_policy{policy="priority"}': 1,
    }
    assert snapshot["trencadis_shadow_rank_displacement_total"] == 4.5


def test_registry_may_be_shared_and_is_exposed():
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    observer.on_step(step_stats(num_running=2))
    assert observer.registry is registry
    assert registry.get_sample_value("trencadis_running_sequences") == 2


def test_sequence_of_two_tokens_has_the_time_of_the_second():
    observer = PrometheusObserver()
    observer.on_request(attrs.evolve(finished_sequence(num_output_tokens=2), first_token_s=1.0, finish_s=1.25))
    assert observer.snapshot()["trencadis_time_per_output_token_seconds_sum"] == 0.25
