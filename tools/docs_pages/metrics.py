"""``docs/metrics.md``: every metric of ``/metrics``, from the objects that keep them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs_pages.markdown import heading_note, table
from trencadis.clock import SimulatedClock
from trencadis.engine.inspect.off import off_metrics
from trencadis.faults import CallMeter
from trencadis.records import Bucket, FinishReason, Phase
from trencadis.startup import Ledger
from trencadis.thread_watch import ENGINE_THREADS
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.counts import Watch
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.runner import empty_pass
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_remote.replicas.pages import replicas_page
from trencadis_server.http_metrics import HttpMetrics
from trencadis_stages.transfer.transfer_metrics import transfer_metrics
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import make_engine
from trencadis_testing.observer import finished_sequence, step_stats
from trencadis_torch.graphs.counts import CaptureWatch, GraphWatch
from trencadis_torch.parallel.experts import load_metrics
from trencadis_torch.parallel.placement import ExpertSlots

__all__ = ["metrics_page"]

_HEAD = f"""# Metrics

{heading_note("what the observer prometheus and the server keep")}

`GET /metrics` answers in Prometheus' text format.
Counters and histograms are totals since the start; a histogram has the series `_bucket`, `_sum` and `_count`.
Durations are in seconds.
How to read them: [Watch and mend](do/watching.md).
"""

_VLLM = """The same numbers under the names that vLLM gives them, so that existing dashboards go on working.
"""

_GAUDI = """`phase` is `prompt` or `decode`, of a unified pass `causal` or `not causal`; `kind` is `real` or `padding`; `state` is `prepared` or `deferred`.
"""

_TORCH = """With `compile = "buckets"`; see [backends](plugins/backend.md).
"""

_CAPTURES = """With `graphs` other than `"off"`; see [backends](plugins/backend.md).
"""

_EXPERTS = """With `[parallel] expert` above 1; see [experts](do/parallel.md#experts).
"""

_TRANSFERS = """Of an engine with a KV connector. What the connector counts itself stands beside them; see [KV connectors](do/kv-connectors.md).
"""


_REPLICAS = """With `parallel.data` above 1. All metrics of engines have the label `replica` then, too; see [Replicas](do/replicas.md).
"""


def metrics_page() -> str:
    """Return the page."""
    engine = list(text_string_to_metric_families(_engine_text()))
    theirs = [metric for metric in engine if metric.name.startswith("vllm")]
    ours = [metric for metric in engine if metric not in theirs]
    parts = [
        _HEAD,
        "## Engine\n",
        _rows([*ours, *text_string_to_metric_families(ENGINE_THREADS.format(1))]),
    ]
    if theirs:
        parts += ["## Engine, by vLLM's names\n", _VLLM, _rows(theirs)]
    parts += ["## KV transfers\n", _TRANSFERS, _rows(text_string_to_metric_families(_transfers_text()))]
    parts += ["## Replicas\n", _REPLICAS, _rows(text_string_to_metric_families(_replicas_text()))]
    parts += ["## Backend gaudi\n", _GAUDI, _rows(text_string_to_metric_families(_gaudi_text()))]
    parts += ["## Backend torch\n", _TORCH, _rows(text_string_to_metric_families(GraphWatch().metrics()))]
    parts += [_CAPTURES, _rows(text_string_to_metric_families(_captures_text()))]
    parts += [_EXPERTS, _rows(text_string_to_metric_families(_experts_text()))]
    parts += ["## Server\n", _rows(text_string_to_metric_families(_server_text()))]
    return "\n".join(parts)


def _engine_text() -> str:
    """Return what an engine shows after one step and one finished sequence, so that every label has a value."""
    observer = PrometheusObserver()
    observer.on_step(step_stats(num_scheduled_tokens=1, num_padded_tokens=1, policy="fcfs"))
    observer.on_request(finished_sequence(num_output_tokens=1, reason=FinishReason.STOP))
    slow = CallMeter("a component", clock=SimulatedClock())
    slow.switch_off("slow")
    return observer.metrics() + off_metrics()


def _transfers_text() -> str:
    """Return what an engine counts beside a connector that counts nothing."""
    engine = make_engine(connector=LoopConnector().pair())
    return transfer_metrics(engine.stage("transfer").transfers)


def _gaudi_text() -> str:
    """Return what the backend shows after one pass."""
    habana = load_habana(GaudiConfig(device="emulated"), clock=SimulatedClock())
    watch = Watch(habana, counts_compilations=True, logs_passes=False)
    bucket = Bucket(1, 1, 1)
    watch.warmed_up(bucket)
    watch.warm_up(1.0, num_prepared=1, num_deferred=0)
    watch.note(empty_pass(bucket))
    return watch.metrics()


def _captures_text() -> str:
    """Return what the backend shows after one replayed pass."""
    watch = CaptureWatch()
    watch.graphs(1, 1)
    watch.note(Bucket(1, 1, 1, Phase.DECODE), replayed=True)
    return watch.metrics()


def _replicas_text() -> str:
    counts = dict.fromkeys(("num_live", "num_placed", "num_moved", "num_rebalanced", "num_restarts"), 0)
    return replicas_page([{"replica": 0, "state": "ready", **counts}], num_quarantined=0)


def _experts_text() -> str:
    """Return what the backend shows of one layer with two experts."""
    return load_metrics({0: np.ones(2, np.int64)}, {0: ExpertSlots(num_experts=2, ranks=((0,), (1,)))})


def _server_text() -> str:
    metrics = HttpMetrics()
    metrics.note(route="/health", method="GET", status=200, num_bytes=1, duration_s=0.0)
    return metrics.text(engine_up=True) + Ledger().metrics()


def _rows(metrics: Iterable[Metric]) -> str:
    return table(("name", "kind", "labels", "meaning"), (_row(metric) for metric in metrics if _is_told(metric)))


def _is_told(metric: Metric) -> bool:
    """Return whether a metric is one to show; when a series began is none."""
    return not metric.name.endswith("_created")


def _row(metric: Metric) -> tuple[str, str, str, str]:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
    return f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation
