"""Metrics of the HTTP side, in a registry of their own; ``/metrics`` shows them together with those of the engine's observers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from trencadis.api import ThreadWatch

__all__ = ["HttpMetrics", "LoopWatch"]

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_LOOK_S = 0.01
"""Interval at which the event loop is checked; a delay is measured too short by at most this."""

_WINDOW_S = 30.0
"""Length of a window; the largest values are those of the present window and of the one before."""


class LoopWatch:
    """Measures the delay of the event loop's callbacks by a periodic timer. Event loop only.

    Args:
        call_later: ``call_later`` of the event loop.
        now_s: Returns wall time, seconds.
        thread_s: Returns CPU time of the event loop's thread, seconds.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        now_s: Callable[[], float] = time.perf_counter,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._call_later = call_later
        self._now_s = now_s
        self._thread_s = thread_s
        self._due_s = self._window_end_s = 0.0
        self._spent_s = 0.0
        self._present = self._before = (0.0, 0.0)

    def start(self) -> None:
        """Start to measure, until the event loop ends."""
        now_s = self._now_s()
        self._window_end_s = now_s + _WINDOW_S
        self._spent_s = self._thread_s()
        self._due_s = now_s + _LOOK_S
        self._call_later(_LOOK_S, self._look)

    def largest(self) -> tuple[float, float]:
        """Return the largest delay, and the part of it that was the thread's own CPU time, seconds."""
        return max(self._present[0], self._before[0]), max(self._present[1], self._before[1])

    def _look(self) -> None:
        now_s, spent_s = self._now_s(), self._thread_s()
        lag_s = max(now_s - self._due_s, 0.0)
        held_s = min(lag_s, spent_s - self._spent_s)
        if now_s > self._window_end_s:
            self._before, self._present = self._present, (0.0, 0.0)
            self._window_end_s = now_s + _WINDOW_S
        self._present = max(self._present[0], lag_s), max(self._present[1], held_s)
        self._spent_s = spent_s
        self._due_s = now_s + _LOOK_S
        self._call_later(_LOOK_S, self._look)


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
        self._loop: LoopWatch | None = None
        self._loop_lag = Gauge(
            "trencadis_event_loop_lag_seconds",
            "By how much callbacks of the server's event loop were late at most, within the last 30 to 60 s.",
            registry=registry,
        )
        self._loop_held = Gauge(
            "trencadis_event_loop_held_seconds",
            "The most CPU time that one delay of the event loop took; far less than the lag: the machine is overloaded.",
            registry=registry,
        )
        self._threads = ThreadWatch(logging.getLogger("trencadis.server"), "The server")
        self._num_threads = Gauge(
            "trencadis_http_threads", "Threads of the process that speaks HTTP.", registry=registry
        )
        # CPU time, memory and open files of the process that speaks HTTP: process_cpu_seconds_total and its like.
        ProcessCollector(registry=registry)

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure this event loop's delays from now on."""
        self._loop = LoopWatch(loop.call_later)
        self._loop.start()

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as in flight while the block runs."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    def note(self, *, route: str, method: str, status: int, num_bytes: int, duration_s: float) -> None:
        """Count a finished request.

        Args:
            route: Path of the route as declared, such as ``/v1/models/{model}``; empty if there is none.
            method: HTTP method; unknown ones are counted as one, so that clients cannot make up labels.
            status: HTTP status of the answer.
            num_bytes: Body bytes sent.
            duration_s: Duration, seconds.
        """
        method = method if method in _METHODS else "other"
        self._requests.labels(route or "none", method, str(status)).inc()
        self._sent.inc(num_bytes)
        self._durations.labels(route or "none").observe(duration_s)
        if status == 429:
            self._refused.inc()

    def note_restart(self) -> None:
        """Count a restart of the engine."""
        self._restarts.inc()

    def text(self, *, engine_up: bool, num_requests: int = 0, num_waiting_tokens: int = 0) -> str:
        """Return all metrics in Prometheus' text format.

        Args:
            engine_up: Whether an engine serves.
            num_requests: Engine requests that admission holds.
            num_waiting_tokens: Prompt tokens of these requests that have no token yet.
        """
        self._engine_up.set(engine_up)
        self._requests_held.set(num_requests)
        self._tokens_held.set(num_waiting_tokens)
        self._num_threads.set(self._threads.look())
        if self._loop is not None:
            lag_s, held_s = self._loop.largest()
            self._loop_lag.set(lag_s)
            self._loop_held.set(held_s)
        return generate_latest(self._registry).decode()
