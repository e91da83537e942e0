"""Metrics of a connector, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["TransferCounters"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferCounters:
    """Totals since the start, in a registry of their own, each with the connector's name. From any thread.

    Args:
        name: Name of the connector.
    """

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = name
        self._lookups = self._counter(
            "lookups", "Look-ups: hit, miss, timeout, declined, or skipped unasked.", "result"
        )
        self._failures = self._counter("transfer_failures", "Look-ups, loads and saves that failed.", "cause")
        self._tokens = self._counter("tokens", "Tokens whose KV was loaded or saved.", "direction")
        self._bytes = self._counter("bytes", "Bytes of objects loaded or saved, headers included.", "direction")
        self._dropped = self._counter("dropped_saves", "Blocks that were not saved, and why.", "reason")
        self._lookup_s = self._histogram("lookup_seconds", "From the question to the store's answer.")
        self._load_s = self._histogram("load_seconds", "From the start of a load to its end, whatever that was.")
        self._breaker = Gauge(
            "trencadis_kv_breaker_state",
            "0: the store is used; 1: it is being tried; 2: it is left alone.",
            ["connector"],
            registry=self._registry,
        )
        self._staged = Gauge(
            "trencadis_kv_staged_bytes", "Blocks that wait to be saved.", ["connector"], registry=self._registry
        )

    def looked_up(self, result: str) -> None:
        """Count a look-up by its result."""
        self._lookups.labels(self._name, result).inc()

    def answered(self, seconds: float) -> None:
        """Record the store's response time."""
        self._lookup_s.labels(self._name).observe(seconds)

    def failed(self, cause: str) -> None:
        """Count a failure."""
        self._failures.labels(self._name, str(cause)).inc()

    def moved(self, direction: str, *, num_tokens: int, num_bytes: int) -> None:
        """Count transferred blocks.

        Args:
            direction: ``load`` or ``save``.
            num_tokens: Number of tokens, in whole blocks.
            num_bytes: Size of the stored objects, bytes.
        """
        self._tokens.labels(self._name, direction).inc(num_tokens)
        self._bytes.labels(self._name, direction).inc(num_bytes)

    def ended(self, seconds: float) -> None:
        """Record the time of a load."""
        self._load_s.labels(self._name).observe(seconds)

    def dropped(self, reason: str, num_blocks: int) -> None:
        """Count blocks that were not saved."""
        self._dropped.labels(self._name, reason).inc(num_blocks)

    def watch(self, *, breaker_state: Callable[[], float], staged_bytes: Callable[[], float]) -> None:
        """Bind two gauges to functions that are called when the metrics are read."""
        self._breaker.labels(self._name).set_function(breaker_state)
        self._staged.labels(self._name).set_function(staged_bytes)

    def value(self, name: str, **labels: str) -> float:
        """Return a sample, such as ``value("lookups_total", result="hit")``; 0 if there is none."""
        found = self._registry.get_sample_value(f"trencadis_kv_{name}", {"connector": self._name, **labels})
        return 0.0 if found is None else found

    def text(self) -> str:
        """Return all metrics, in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"trencadis_kv_{name}", text, ["connector", label], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"trencadis_kv_{name}", text, ["connector"], buckets=_SECONDS, registry=self._registry)
