"""Metrics for Prometheus, in a registry of their own, so that two engines in one process stay apart.

Counters and histograms are totals since the start; rates and quantiles are for the reader to take
(``rate(trencadis_output_tokens_total[1m])``). The server's ``/metrics`` shows them under vLLM's names as well.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trencadis.interfaces import Observer
from trencadis.records import EngineGauges, FinishedSequence, FinishReason, StepStats
from trencadis_plugins.observer.config import PrometheusObserverConfig
from trencadis_plugins.observer.draft_metrics import DraftMetrics
from trencadis_plugins.observer.longest_step import LongestStep
from trencadis_plugins.observer.vllm_names import VllmNames
from trencadis_plugins.observer.weighted import WeightedHistogram

__all__ = ["PrometheusObserver"]

_COUNTERS = {
    "steps": ("Committed steps.", None),
    "scheduled_tokens": ("Tokens computed, padding left out.", "num_scheduled_tokens"),
    "padded_tokens": ("Token positions computed, padding included.", "num_padded_tokens"),
    "output_tokens": ("Output tokens committed.", "num_emitted_tokens"),
    "prompt_tokens": ("Prompt tokens of admitted sequences.", "num_prompt_tokens_admitted"),
    "prompt_tokens_cached": ("Prompt tokens taken from the prefix cache.", "num_prompt_tokens_cached"),
    "recomputed_tokens": ("Tokens computed again after a preemption.", "num_recomputed_tokens"),
    "drafted_sequences": ("Sequences with drafts, summed over steps.", "num_drafted_sequences"),
    "draft_tokens": ("Draft tokens verified.", "num_draft_tokens"),
    "accepted_tokens": ("Draft tokens emitted; the others were computed in vain.", "num_accepted_tokens"),
    "draft_seconds": ("Time that drafts took to make.", "draft_s"),
    "preemptions": ("Sequences that lost their blocks.", "num_preempted"),
    "compilations": ("Programs compiled while requests waited.", "num_compilations"),
    "shadow_steps": ("Steps in which a shadow policy was asked what it would do.", "num_shadow_steps"),
    "shadow_differing_steps": ("Steps in which the shadow policy would have chosen otherwise.", "num_shadow_differing"),
    "shadow_rank_displacement": (
        "Places by which the shadow policy would have ordered waiting sequences otherwise: their mean, summed over steps.",
        "shadow_displacement",
    ),
    "shadow_seconds": ("Time that the shadow policy took.", "shadow_s"),
    "bucket_hits": ("Passes in a bucket of the strategy's table.", "num_bucket_hits"),
    "bucket_fallbacks": ("Passes whose shape no bucket of the table covers.", "num_fallbacks"),
    "bucket_substitutions": ("Passes in a larger bucket, theirs not being prepared yet.", "num_substituted"),
    "unprepared_buckets": ("Buckets that were not prepared when a pass needed them.", "num_unprepared"),
    "block_swaps": ("Pairs of KV blocks that the defragmenter let change places.", "num_block_swaps"),
    "blocks_swapped_out": ("KV blocks copied to host memory.", "num_blocks_swapped_out"),
    "blocks_swapped_in": ("KV blocks copied back from host memory.", "num_blocks_swapped_in"),
    "swap_fallbacks": ("Preempted sequences that host memory had no room for.", "num_swap_fallbacks"),
}
_GAUGES = {
    "running_sequences": ("Sequences that hold blocks and a row.", "num_running"),
    "waiting_sequences": ("Sequences that wait.", "num_waiting"),
    "compiling_sequences": (
        "Waiting sequences whose sampler has work to do before they can run, such as a grammar.",
        "num_compiling",
    ),
    "swapped_sequences": ("Waiting sequences whose KV is in host memory.", "num_swapped"),
    "free_blocks": ("KV blocks with nothing in them.", "num_free_blocks"),
    "cached_blocks": ("Unreferenced KV blocks kept for reuse.", "num_cached_blocks"),
    "used_blocks": ("KV blocks held by sequences or transfers.", "num_used_blocks"),
    "quarantined_policies": ("Scheduling policies that their fallback replaced since the start.", "num_quarantined"),
    "quarantined_drafters": (
        "Speculators and draft lengths that failed since the start: a fallback replaced them, or speculation went off.",
        "num_drafters_quarantined",
    ),
}
_STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_HISTOGRAMS = {
    "plan_seconds": ("Time to make a plan and its batch.", "plan_s"),
    "device_seconds": ("Time of a step on the device.", "device_s"),
    "commit_seconds": ("Time to commit a step.", "commit_s"),
}
_REQUEST_HISTOGRAMS = {
    "queue_seconds": ("From arrival until first scheduled.", _REQUEST_BUCKETS_S),
    "time_to_first_token_seconds": ("From arrival until the first token.", _REQUEST_BUCKETS_S),
    "time_per_output_token_seconds": ("Mean time of the output tokens after the first.", _TOKEN_BUCKETS_S),
    "end_to_end_seconds": ("From arrival until the end, of sequences that ran to it.", _REQUEST_BUCKETS_S),
    "prefill_seconds": ("From first scheduled until the first token.", _REQUEST_BUCKETS_S),
    "decode_seconds": ("From the first token until the end.", _REQUEST_BUCKETS_S),
    "inference_seconds": ("From first scheduled until the end.", _REQUEST_BUCKETS_S),
    "request_prompt_tokens": ("Prompt tokens of a sequence.", _TOKENS_BUCKETS),
    "request_output_tokens": ("Output tokens of a sequence.", _TOKENS_BUCKETS),
}


class PrometheusObserver(Observer):
    """Counts steps, tokens and blocks, and spreads latencies over histograms; all names start with ``trencadis_``.

    Attributes:
        registry: Where the metrics are; hand it to an exporter.

    Args:
        registry: To share with others; a new one by default.
        config: Whether and how vLLM's names are shown.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, config: PrometheusObserverConfig | None = None
    ) -> None:
        config = config if config is not None else PrometheusObserverConfig()
        self.registry = registry if registry is not None else CollectorRegistry()
        self._vllm_names: CollectorRegistry | None = None
        if config.vllm_names:
            self._vllm_names = CollectorRegistry()
            self._vllm_names.register(VllmNames(self.registry, model_name=config.model_name))
        self._counters = [
            (attribute, Counter(f"trencadis_{name}", text, registry=self.registry))
            for name, (text, attribute) in _COUNTERS.items()
        ]
        self._gauges = [
            (attribute, Gauge(f"trencadis_{name}", text, registry=self.registry))
            for name, (text, attribute) in _GAUGES.items()
        ]
        self._step_times = [
            (attribute, Histogram(f"trencadis_step_{name}", text, registry=self.registry, buckets=_STEP_BUCKETS_S))
            for name, (text, attribute) in _STEP_HISTOGRAMS.items()
        ]
        self._latencies = {
            name: Histogram(f"trencadis_{name}", text, registry=self.registry, buckets=buckets)
            for name, (text, buckets) in _REQUEST_HISTOGRAMS.items()
        }
        self._step_tokens = Histogram(
            "trencadis_step_tokens", "Tokens of a step.", registry=self.registry, buckets=_STEP_TOKENS_BUCKETS
        )
        self._gaps = WeightedHistogram(
            "trencadis_inter_token_seconds",
            "Time between output tokens, each of a sequence counted with the mean of the sequence.",
            registry=self.registry,
            buckets=_TOKEN_BUCKETS_S,
        )
        self._finished = Counter(
            "trencadis_finished_sequences",
            "Sequences that left the engine, by reason.",
            ["finish_reason"],
            registry=self.registry,
        )
        self._padding = Gauge(
            "trencadis_padding_ratio", "Share of the token positions computed that are padding.", registry=self.registry
        )
        self._recompute = Gauge(
            "trencadis_recompute_ratio", "Share of the tokens computed that were lost before.", registry=self.registry
        )
        self._policies = Gauge(
            "trencadis_scheduling_policy",
            "The scheduling policy in force: 1 under its name, and 0 under those that were.",
            ["policy"],
            registry=self.registry,
        )
        self._drafts = DraftMetrics(self.registry)
        self._longest = LongestStep(self.registry)
        self._policy = ""
        self._num_scheduled = self._num_padded = self._num_recomputed = 0

    def on_step(self, stats: StepStats) -> None:
        """Count the step. About 20 µs."""
        self._step_tokens.observe(stats.num_scheduled_tokens)
        for attribute, counter in self._counters:
            amount = 1 if attribute is None else getattr(stats, attribute)
            if amount:
                counter.inc(amount)
        for gauge_attribute, gauge in self._gauges:
            gauge.set(getattr(stats, gauge_attribute))
        for time_attribute, histogram in self._step_times:
            histogram.observe(getattr(stats, time_attribute))
        if stats.policy and stats.policy != self._policy:
            if self._policy:
                self._policies.labels(self._policy).set(0)
            self._policy = stats.policy
            self._policies.labels(self._policy).set(1)
        self._drafts.count(stats)
        self._longest.note(stats)
        self._num_scheduled += stats.num_scheduled_tokens
        self._num_padded += stats.num_padded_tokens
        self._num_recomputed += stats.num_recomputed_tokens
        if self._num_padded:
            self._padding.set(1 - self._num_scheduled / self._num_padded)
        if self._num_scheduled:
            self._recompute.set(self._num_recomputed / self._num_scheduled)

    def on_request(self, finished: FinishedSequence) -> None:
        """Count the sequence and the latencies it has: one that was never scheduled has none.

        The end-to-end time of an aborted or failed sequence says nothing about the engine's speed, and is left out.
        """
        self._finished.labels(finished.finish_reason.value).inc()
        latencies = self._latencies
        latencies["request_prompt_tokens"].observe(finished.num_prompt_tokens)
        latencies["request_output_tokens"].observe(len(finished.token_ids))
        if finished.first_scheduled_s is not None:
            latencies["queue_seconds"].observe(finished.first_scheduled_s - finished.arrival_s)
        if finished.first_token_s is not None:
            latencies["time_to_first_token_seconds"].observe(finished.first_token_s - finished.arrival_s)
            latencies["decode_seconds"].observe(finished.finish_s - finished.first_token_s)
            if finished.first_scheduled_s is not None:
                latencies["prefill_seconds"].observe(finished.first_token_s - finished.first_scheduled_s)
                latencies["inference_seconds"].observe(finished.finish_s - finished.first_scheduled_s)
            num_later = len(finished.token_ids) - 1
            if num_later > 0:
                mean_s = (finished.finish_s - finished.first_token_s) / num_later
                latencies["time_per_output_token_seconds"].observe(mean_s)
                self._gaps.observe(mean_s, num_later)
        if finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            latencies["end_to_end_seconds"].observe(finished.finish_s - finished.arrival_s)

    def on_scrape(self, gauges: EngineGauges) -> None:
        """Show what the engine holds now, not what it held at its last step."""
        for attribute, gauge in self._gauges:
            if hasattr(gauges, attribute):
                gauge.set(getattr(gauges, attribute))

    def metrics(self) -> str:
        """Return all metrics in Prometheus' text format, and once more under vLLM's names unless that is switched off."""
        theirs = "" if self._vllm_names is None else generate_latest(self._vllm_names).decode()
        return self.text() + theirs

    def text(self) -> str:
        """Return all metrics in Prometheus' text format. May be called on any thread."""
        return generate_latest(self.registry).decode()

    def snapshot(self) -> dict[str, float]:
        """Return every sample by name, labels in braces as in the text format. May be called on any thread."""
        return {
            sample.name + _labels(sample.labels): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
        }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
