"""Prometheus metrics of compiled graphs and of CUDA graphs. May be read on any thread."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from trencadis.records import Bucket

__all__ = ["GraphWatch", "CaptureWatch"]

logger = logging.getLogger("trencadis.torch")


class GraphWatch:
    """Counts of one backend."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._graphs = Gauge("trencadis_torch_graphs", "Compiled graphs.", registry=registry)
        self._from_disk = Gauge("trencadis_torch_graphs_from_disk", "Of these, those found on disk.", registry=registry)
        self._seconds = Counter("trencadis_torch_warmup_seconds", "Time spent on preparing buckets.", registry=registry)
        self._recompiled = Counter(
            "trencadis_torch_recompilations", "Programs compiled after the warm-up.", registry=registry
        )
        self._eager = Counter("trencadis_torch_eager_passes", "Passes whose shape has no graph.", registry=registry)

    def warmed_up(self, *, num_graphs: int, num_cached: int, took_s: float) -> None:
        """Note the graphs of a warm-up, the number of them on disk, and its duration."""
        self._graphs.inc(num_graphs)
        self._from_disk.inc(num_cached)
        self._seconds.inc(max(0.0, took_s))

    def stepped(self, *, num_compilations: int, num_eager: int) -> None:
        """Note the compilations of a step, which should not occur, and its passes without a graph."""
        self._eager.inc(num_eager)
        if num_compilations:
            self._recompiled.inc(num_compilations)
            logger.warning("torch.compile made %d graphs while requests waited.", num_compilations)

    def metrics(self) -> str:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class CaptureWatch:
    """Sees every decode pass of one backend.

    Attributes:
        num_replays: Passes that were replayed.
        num_misses: Decode passes in buckets without a graph.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_misses = 0
        self._missed: set[Bucket] = set()
        self._is_ready = False
        self._registry = registry = CollectorRegistry()
        self._graphs = Gauge("trencadis_torch_captured_graphs", "Captured graphs.", registry=registry)
        self._bytes = Gauge("trencadis_torch_captured_bytes", "Memory that the capture took, bytes.", registry=registry)
        self._replays = Counter(
            "trencadis_torch_graph_replays",
            "Decode passes replayed, by bucket.",
            ("batch_size", "query_len", "num_blocks"),
            registry=registry,
        )
        self._misses = Counter("trencadis_torch_graph_misses", "Decode passes without a graph.", registry=registry)

    def graphs(self, number: int, num_bytes: int) -> None:
        """Note the number of graphs after the warm-up, and their memory, bytes."""
        self._is_ready = True
        self._graphs.set(number)
        self._bytes.set(num_bytes)

    def note(self, bucket: Bucket, *, replayed: bool) -> None:
        """See a decode pass; warn once of a bucket that has no graph. Passes of the warm-up do not count."""
        if not self._is_ready:
            return
        if replayed:
            self.num_replays += 1
            self._replays.labels(str(bucket.batch_size), str(bucket.query_len), str(bucket.num_blocks)).inc()
            return
        self.num_misses += 1
        self._misses.inc()
        if bucket not in self._missed:
            self._missed.add(bucket)
            logger.warning("No graph was captured for %s: its passes run without.", bucket)

    def metrics(self) -> str:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self._registry).decode()
