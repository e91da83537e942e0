from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trencadis_server.http_metrics import HttpMetrics, LoopWatch


def samples_of(metrics: HttpMetrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.text(engine_up=True))
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def note(metrics, **changes):
    metrics.note(**{"route": "/a", "method": "GET", "status": 200, "num_bytes": 10, "duration_s": 0.02, **changes})


def test_requests_bytes_and_durations_add_up():
    metrics = HttpMetrics()
    note(metrics)
    note(metrics, duration_s=2.0, num_bytes=5)
    samples = samples_of(metrics)
    assert samples["trencadis_http_requests_total", "method=GET", "route=/a", "status=200"] == 2
    assert samples[("trencadis_http_response_bytes_total",)] == 15
    assert samples["trencadis_http_request_duration_seconds_sum", "route=/a"] == 2.02
    assert samples["trencadis_http_request_duration_seconds_bucket", "le=0.025", "route=/a"] == 1


def test_clients_cannot_make_up_labels():
    metrics = HttpMetrics()
    for number in range(50):
        note(metrics, method=f"X{number}", route="")
    names = [key for key in samples_of(metrics) if key[0] == "trencadis_http_requests_total"]
    assert names == [("trencadis_http_requests_total", "method=other", "route=none", "status=200")]


class Loop:
    """An event loop by hand: what was asked for last, and the clocks it goes by."""

    def __init__(self):
        self.now_s, self.thread_s = 100.0, 5.0
        self.watch = LoopWatch(self.call_later, now_s=lambda: self.now_s, thread_s=lambda: self.thread_s)
        self.watch.start()

    def call_later(self, delay_s, callback):
        self.due_s, self.callback = self.now_s + delay_s, callback

    def go(self, *, late_s=0.0, held_s=0.0):
        self.now_s, self.thread_s = self.due_s + late_s, self.thread_s + held_s
        self.callback()


def test_the_longest_delay_of_the_event_loop_is_kept_with_the_cpu_time_of_the_longest_that_was_its_own():
    loop = Loop()
    loop.go()
    assert loop.watch.largest() == (0.0, 0.0)
    loop.go(late_s=0.2, held_s=0.21)
    loop.go(late_s=1.0, held_s=0.05)  # others had the processor
    loop.go(late_s=0.0, held_s=0.009)  # busy, but never late
    assert loop.watch.largest() == pytest.approx((1.0, 0.2))


def test_delays_are_forgotten_after_a_minute_but_not_within_half_of_one():
    loop = Loop()
    loop.go(late_s=1.0, held_s=1.0)
    loop.go(late_s=29.5)
    assert loop.watch.largest() == pytest.approx((29.5, 1.0))
    loop.go(late_s=29.0)
    assert loop.watch.largest() == pytest.approx((29.5, 1.0))
    loop.go(late_s=31.0)
    assert loop.watch.largest() == pytest.approx((31.0, 0.0))


def test_a_callback_that_holds_the_event_loop_shows_in_the_metrics():
    metrics = HttpMetrics()

    async def hold():
        metrics.watch_loop(asyncio.get_running_loop())
        await asyncio.sleep(0)
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass
        await asyncio.sleep(0.02)

    asyncio.run(hold())
    samples = samples_of(metrics)
    assert samples[("trencadis_event_loop_lag_seconds",)] >= 0.15
    assert 0.15 <= samples[("trencadis_event_loop_held_seconds",)] <= 0.3


def test_refusals_restarts_and_requests_in_flight_are_counted_for_each_server():
    metrics, other = HttpMetrics(), HttpMetrics()
    note(metrics, status=429)
    note(metrics, status=400)
    metrics.note_restart()
    with contextlib.suppress(KeyError), metrics.in_flight():
        assert samples_of(metrics)[("trencadis_http_requests_in_flight",)] == 1
        raise KeyError
    names = (
        "trencadis_http_requests_refused_total", "trencadis_engine_restarts_total", "trencadis_http_requests_in_flight",
    )  # fmt: skip
    assert [samples_of(metrics)[(name,)] for name in names] == [1, 1, 0]
    assert [samples_of(other)[(name,)] for name in names] == [0, 0, 0]
