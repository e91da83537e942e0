from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trencadis.server.http_metrics import HttpMetrics


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


def test_refusals_are_counted_apart():
    metrics = HttpMetrics()
    note(metrics, status=429)
    note(metrics, status=400)
    assert samples_of(metrics)[("trencadis_http_requests_refused_total",)] == 1


def test_clients_cannot_make_up_labels():
    metrics = HttpMetrics()
    for number in range(50):
        note(metrics, method=f"X{number}", route="")
    names = [key for key in samples_of(metrics) if key[0] == "trencadis_http_requests_total"]
    assert names == [("trencadis_http_requests_total", "method=other", "route=none", "status=200")]


def test_requests_in_flight_go_down_also_when_one_fails():
    metrics = HttpMetrics()
    try:
        with metrics.in_flight():
            assert samples_of(metrics)[("trencadis_http_requests_in_flight",)] == 1
            raise KeyError
    except KeyError:
        pass
    assert samples_of(metrics)[("trencadis_http_requests_in_flight",)] == 0


def test_restarts_are_counted():
    metrics = HttpMetrics()
    metrics.note_restart()
    assert samples_of(metrics)[("trencadis_engine_restarts_total",)] == 1


def test_two_servers_in_a_process_stay_apart():
    one, other = HttpMetrics(), HttpMetrics()
    one.note_restart()
    assert samples_of(other)[("trencadis_engine_restarts_total",)] == 0
