"""Counters of compilations after the warm-up, each with one warning, and of padding.

Source of the warnings' texts: vllm-gaudi, v1/worker/hpu_model_runner.py and hpu_worker.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from trencadis.records import Bucket, Pass, Phase, UnifiedBucket
from trencadis_gaudi.habana import Habana

__all__ = ["Compilations", "Configuration", "Watch", "configuration"]

logger = logging.getLogger("trencadis.gaudi")

Configuration = tuple[str, int, int, int]
"""Phase, padded batch size, query length, number of blocks, as the vendor's warnings name it; of a unified bucket whether it is
causal, query length, shared and unique blocks."""


def configuration(bucket: Bucket) -> Configuration:
    """Return the name of a bucket in warnings. Pure."""
    if isinstance(bucket, UnifiedBucket):
        causal = "causal" if bucket.is_causal else "not causal"
        return causal, bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks
    phase = "decode" if bucket.phase is Phase.DECODE else "prompt"
    return phase, bucket.batch_size, bucket.query_len, bucket.num_blocks


def _named(bucket: Bucket, found: Configuration) -> str:
    if isinstance(bucket, UnifiedBucket):
        return f"(query, shared_blocks, unique_blocks) {found[1:]}, ({found[0]})"
    return str(found)


@attrs.define
class Compilations:
    """Number of programs compiled within a context."""

    number: int = 0


class Watch:
    """Counts passes and compilations of one backend. Metrics may be read on any thread.

    Args:
        habana: Device whose metric ``graph_compilation`` is read.
        counts_compilations: Whether compilations are counted.
        logs_passes: Whether every pass is logged.

    Attributes:
        num_unwarmed: Number of distinct buckets that ran without a warm-up.
        num_recompilations: Number of programs compiled after the warm-up.
        num_graph_breaks: Number of times that torch.compile left code out of its graphs.
    """

    def __init__(self, habana: Habana, *, counts_compilations: bool, logs_passes: bool) -> None:
        self._habana = habana
        self._counts = counts_compilations
        self._logs_passes = logs_passes
        self._warmed: set[Configuration] = set()
        self.num_unwarmed = 0
        self.num_recompilations = 0
        self.num_graph_breaks = 0
        self._seen_breaks: dict[str, int] = {}
        self._registry = CollectorRegistry()
        self._recompiled = self._counter("recompilations", "Programs compiled after the warm-up.")
        self._breaks = self._counter(
            "graph_breaks", "Times that torch.compile has left code out of its graphs: it runs one operation at a time."
        )
        self._unwarmed = self._counter("unwarmed_buckets", "Buckets first used after the warm-up.")
        self._positions = self._counter("positions", "Token positions computed, by phase.", "phase", "kind")
        self._passes = self._counter(
            "bucket_passes", "Passes by bucket.", "phase", "batch_size", "query_len", "num_blocks"
        )
        self._padding = self._gauge(
            "padding_ratio", "Share of the positions computed that are padding, by phase.", "phase"
        )
        self._graphs = self._gauge("graphs", "Captured graphs.")
        self._graph_bytes = self._gauge("graph_bytes", "Memory of captured graphs, bytes.")
        self._warm_up_s = self._counter("warmup_seconds", "Time spent on preparing buckets.")
        self._buckets = self._gauge("warmup_buckets", "Buckets that are prepared, and that will be.", "state")
        self._num_positions: dict[str, list[int]] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trencadis_gaudi_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"trencadis_gaudi_{name}", text, labels, registry=self._registry)

    def warm_up(self, seconds: float, *, num_prepared: int, num_deferred: int) -> None:
        """Add warm-up time, seconds, and set the numbers of prepared and deferred buckets."""
        self._warm_up_s.inc(max(0.0, seconds))
        self._buckets.labels("prepared").set(num_prepared)
        self._buckets.labels("deferred").set(num_deferred)

    def warmed_up(self, bucket: Bucket) -> None:
        """Record that a bucket is prepared."""
        self._warmed.add(configuration(bucket))

    def graphs(self, number: int, num_bytes: int) -> None:
        """Set the number of graphs and their memory, bytes."""
        self._graphs.set(number)
        self._graph_bytes.set(num_bytes)

    def note(self, one: Pass) -> None:
        """Count a pass; warn if its bucket was not warmed up. Takes about 5 µs."""
        found = configuration(one.bucket)
        if self._logs_passes:
            logger.info("[fwd] %s", found)
        if found not in self._warmed:
            self._warmed.add(found)
            self.num_unwarmed += 1
            self._unwarmed.inc()
            logger.warning("Configuration: %s was not warmed-up!", _named(one.bucket, found))
        phase, *sizes = found
        num_real = int(one.query_lens.sum())
        num_padding = max(0, one.bucket.num_tokens - num_real)
        self._positions.labels(phase, "real").inc(num_real)
        self._positions.labels(phase, "padding").inc(num_padding)
        sums = self._num_positions.setdefault(phase, [0, 0])
        sums[0] += num_padding
        sums[1] += num_real + num_padding
        self._padding.labels(phase).set(sums[0] / max(1, sums[1]))
        self._passes.labels(phase, *map(str, sizes)).inc()

    def note_breaks(self) -> None:
        """Count new graph breaks of torch.compile; warn once for each place. Takes about 2 µs."""
        found = self._habana.dynamo.breaks()
        for place, number in found.items():
            new = number - self._seen_breaks.get(place, 0)
            if new <= 0:
                continue
            if place not in self._seen_breaks:
                logger.warning("torch.compile broke a graph; what is outside runs one operation at a time: %s", place)
            self._seen_breaks[place] = number
            self.num_graph_breaks += new
            self._breaks.inc(new)

    @contextlib.contextmanager
    def compilations(self, *, warns: bool = True) -> Iterator[Compilations]:
        """Count compilations and graph breaks within a ``with`` block.

        Args:
            warns: Whether a compilation is unexpected, and logged as a warning.
        """
        found = Compilations()
        if not self._counts:
            yield found
            self.note_breaks()
            return
        with self._habana.hpu.metrics.metric_localcontext("graph_compilation") as metric:
            yield found
            stats = metric.stats()
        self.note_breaks()
        found.number = int(stats[0][1])
        if found.number and warns:
            self.num_recompilations += found.number
            self._recompiled.inc(found.number)
            logger.warning("graph compilation detected: %s", stats)

    def metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()
