"""What is counted about graphs of torch.compile. May be read on any thread."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

__all__ = ["GraphWatch"]

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
        """Note what a warm-up has made, how much of it was on disk, and its duration."""
        self._graphs.inc(num_graphs)
        self._from_disk.inc(num_cached)
        self._seconds.inc(max(0.0, took_s))

    def stepped(self, *, num_compilations: int, num_eager: int) -> None:
        """Note what a step compiled, which should be nothing, and how many of its passes had no graph."""
        self._eager.inc(num_eager)
        if num_compilations:
            self._recompiled.inc(num_compilations)
            logger.warning("torch.compile made %d graphs while requests waited.", num_compilations)

    def metrics(self) -> str:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self._registry).decode()
