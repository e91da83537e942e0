"""What the HTTP side counts, in a registry of its own; ``/metrics`` shows it beside what the engine's observers have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

__all__ = ["HttpMetrics"]

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Counters of one server; all names start with ``trencadis_``. Event loop only."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ["route", "method", "status"]
        self._requests = Counter("trencadis_http_requests", "HTTP requests answered.", labels, registry=registry)
        self._in_flight = Gauge("trencadis_http_requests_in_flight", "HTTP requests inside.", registry=registry)
        self._sent = Counter("trencadis_http_response_bytes", "Bytes of answers, headers left out.", registry=registry)
        self._refused = Counter("trencadis_http_requests_refused", "Requests answered 429.", registry=registry)
        self._durations = Histogram(
            "trencadis_http_request_duration_seconds",
            "From the request's head until its answer was complete.",
            ["route"],
            registry=registry,
            buckets=_DURATION_BUCKETS_S,
        )
        self._requests_held = Gauge("trencadis_admitted_requests", "Engine requests in the server.", registry=registry)
        self._tokens_held = Gauge(
            "trencadis_admitted_waiting_tokens", "Prompt tokens of requests that have no token yet.", registry=registry
        )
        self._engine_up = Gauge("trencadis_engine_up", "1 while an engine serves, else 0.", registry=registry)
        self._restarts = Counter(
            "trencadis_engine_restarts", "Engines started in place of one that ended.", registry=registry
        )
        # CPU time, memory and open files of the process that speaks HTTP: process_cpu_seconds_total and its like.
        ProcessCollector(registry=registry)

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    def note(self, *, route: str, method: str, status: int, num_bytes: int, duration_s: float) -> None:
        """Count a request that has ended.

        Args:
            route: Its path as declared, such as ``/v1/models/{model}``; empty if there is none.
            method: HTTP method; unknown ones are counted as one, so that clients cannot make up labels.
            status: Of the answer.
            num_bytes: Body bytes sent.
            duration_s: How long it took, seconds.
        """
        method = method if method in _METHODS else "other"
        self._requests.labels(route or "none", method, str(status)).inc()
        self._sent.inc(num_bytes)
        self._durations.labels(route or "none").observe(duration_s)
        if status == 429:
            self._refused.inc()

    def note_restart(self) -> None:
        """Count an engine that was started in place of one that ended."""
        self._restarts.inc()

    def text(self, *, engine_up: bool, num_requests: int = 0, num_waiting_tokens: int = 0) -> str:
        """Return all metrics in Prometheus' text format.

        Args:
            engine_up: An engine serves.
            num_requests: Engine requests that admission holds.
            num_waiting_tokens: Prompt tokens that wait, of them.
        """
        self._engine_up.set(engine_up)
        self._requests_held.set(num_requests)
        self._tokens_held.set(num_waiting_tokens)
        return generate_latest(self._registry).decode()
