"""Our metrics under vLLM's names, so that dashboards and alerts made for it keep working. Made when asked for, from ours.

Source: vLLM, docs/usage/metrics.md and vllm/v1/metrics/loggers.py: names, labels ``model_name`` and ``engine``, units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily

__all__ = ["VLLM_NAMES", "VllmNames"]

VLLM_NAMES: Mapping[str, str] = {
    "trencadis_running_sequences": "vllm:num_requests_running",
    "trencadis_waiting_sequences": "vllm:num_requests_waiting",
    "trencadis_swapped_sequences": "vllm:num_requests_swapped",
    "trencadis_preemptions": "vllm:num_preemptions",
    "trencadis_prompt_tokens": "vllm:prompt_tokens",
    "trencadis_output_tokens": "vllm:generation_tokens",
    "trencadis_finished_sequences": "vllm:request_success",
    "trencadis_drafted_sequences": "vllm:spec_decode_num_drafts",
    "trencadis_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "trencadis_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "trencadis_accepted_tokens_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "trencadis_prompt_tokens_cached": "vllm:prefix_cache_hits",
    "trencadis_step_tokens": "vllm:iteration_tokens_total",
    "trencadis_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "trencadis_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "trencadis_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "trencadis_end_to_end_seconds": "vllm:e2e_request_latency_seconds",
    "trencadis_queue_seconds": "vllm:request_queue_time_seconds",
    "trencadis_prefill_seconds": "vllm:request_prefill_time_seconds",
    "trencadis_decode_seconds": "vllm:request_decode_time_seconds",
    "trencadis_inference_seconds": "vllm:request_inference_time_seconds",
    "trencadis_request_prompt_tokens": "vllm:request_prompt_tokens",
    "trencadis_request_output_tokens": "vllm:request_generation_tokens",
}
"""vLLM's name of each of our metrics that has one; without the suffix of counters."""

_QUERIES = "vllm:prefix_cache_queries"
_USAGE = "vllm:kv_cache_usage_perc"
_LABEL_NAMES = {"finish_reason": "finished_reason"}


class VllmNames:
    """A collector over another registry.

    Args:
        registry: Has our metrics.
        model_name: Value of the label ``model_name``.
    """

    def __init__(self, registry: CollectorRegistry, *, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield what the registry holds at the moment, under vLLM's names."""
        metrics = {metric.name: metric for metric in self._registry.collect()}
        for ours, theirs in VLLM_NAMES.items():
            yield self._renamed(metrics[ours], theirs)
        # Every prompt token is looked up in the prefix cache.
        yield self._renamed(metrics["trencadis_prompt_tokens"], _QUERIES)
        yield self._usage(metrics)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {_LABEL_NAMES.get(key, key): value for key, value in sample.labels.items()} | self._labels
            renamed.add_sample(name + sample.name.removeprefix(metric.name), labels, sample.value)
        return renamed

    def _usage(self, metrics: Mapping[str, Metric]) -> Metric:
        used, cached, free = (
            _value(metrics[f"trencadis_{kind}_blocks"].samples) for kind in ("used", "cached", "free")
        )
        total = used + cached + free
        family = GaugeMetricFamily(_USAGE, "Share of the KV blocks in use, 0 .. 1.", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), used / total if total else 0.0)
        return family


def _value(samples: Iterable[object]) -> float:
    """Return the value of a metric that has one sample. Pure."""
    (sample,) = samples
    value: float = getattr(sample, "value")  # noqa: B009 - the type of samples has no public name
    return value
