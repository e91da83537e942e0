"""What one component shows cannot spoil the page for all: every page that is shown, Prometheus' own parser reads, each family once."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, Summary, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.parser import text_string_to_metric_families

from trencadis.clock import SimulatedClock
from trencadis.engine.inspect.metrics_page import MAX_PAGE_CHARS, MetricsPage
from trencadis.engine.inspect.observers import Observers
from trencadis.faults import FaultLog
from trencadis.interfaces import Observer

GOOD = "# HELP mine_total Some.\n# TYPE mine_total counter\nmine_total 1.0\n"


def page() -> MetricsPage:
    return MetricsPage(FaultLog(logging.getLogger("trencadis.engine")))


def names(text: str) -> list[str]:
    return [family.name for family in text_string_to_metric_families(text)]


def library_page() -> str:
    registry = CollectorRegistry()
    histogram = Histogram("h_seconds", 'With "quotes", \\ and\nlines.', ["a"], registry=registry)
    for label in ('x"y', "a\\b", "n\nl", "ü", ""):
        histogram.labels(label).observe(0.3)
    Summary("s", "A summary.", registry=registry).observe(1)
    PrometheusCounter("c", "A counter.", ["k"], registry=registry).labels("v").inc(1e30)
    Gauge("g", "A gauge.", registry=registry).set(float("nan"))
    Gauge("i", "A gauge.", registry=registry).set(float("-inf"))
    return generate_latest(registry).decode()


def test_what_the_library_writes_is_shown_as_it_is() -> None:
    shown = page()
    text = library_page()
    assert shown.add("o of p 1.0", text)
    assert shown.text == text


@pytest.mark.parametrize(
    "garbage",
    [
        "what is this\n",
        "<html>\n",
        "mine\n",
        "mine one\n",
        "1mine 1\n",
        'mine{a="b} 1\n',
        "mine{a=b} 1\n",
        'mine{a="1",b="2",a="3"} 1\n',
        "mine{} {} 1\n",
        "mine 1 2 3\n",
        "mine-or-not 1\n",
        "ümine 1\n",
        "# TYPE mine nonsense\nmine 1\n",
        "# TYPE mine counter\n# TYPE mine gauge\nmine 1\n",
        "mine 1\nmine 2\n",
        'mine{a="1"} 1\nmine{a="1"} 2\n',
        "mine 1\x00\n",
        "mine 1\r\n",
        "x" * (MAX_PAGE_CHARS + 1),
    ],
)
def test_garbage_of_one_is_left_out_with_its_name_and_all_others_are_shown(
    garbage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shown = page()
    assert shown.add("first", "a 1\n")
    assert not shown.add('observer component "bad" of bad-metrics 0.2', f"good 1\n{garbage}")
    assert shown.add("last", GOOD)
    assert shown.text == f"a 1\n{GOOD}"
    assert 'observer component "bad" of bad-metrics 0.2 returned metrics with ' in caplog.text
    assert "nothing of it is shown. Mend its metrics(), or take it out of the configuration." in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "taken",
    [
        GOOD,
        "mine_total 5\n",
        'mine_total{a="1"} 5\n',
        "b 1\nmine_total 5\n",
        "# TYPE trencadis_engine_up gauge\ntrencadis_engine_up 1\n",
        'trencadis_http_requests_total{route="x"} 1\n',
        "process_cpu_seconds_total 1\n",
        "# TYPE trencadis_http_request_duration_seconds histogram\ntrencadis_http_request_duration_seconds_count 1\n",
    ],
)
def test_a_family_that_another_one_has_is_shown_once(taken: str, caplog: pytest.LogCaptureFixture) -> None:
    shown = page()
    assert shown.add("first", GOOD)
    assert not shown.add("second of p 1.0", taken + "own 1\n")
    assert names(shown.text) == [*(["mine"]), *(["b"] if "b 1" in taken else []), "own"]
    assert "second of p 1.0 returned metrics with " in caplog.text
    assert "which the page has already" in caplog.text


def test_a_family_that_comes_in_two_parts_is_shown_once() -> None:
    shown = page()
    assert not shown.add("o", 'a{x="1"} 1\nb 1\na{x="2"} 1\n')
    assert shown.text == 'a{x="1"} 1\nb 1\n'


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "a 1",
                "b 2",
                'a{x="1"} 1',
                'c{x="\\\\",y="\\n"} +Inf',
                "# HELP a b",
                "# TYPE a counter",
                "# note",
                "",
                "a 1e5 12",
            ]
        ),
        st.text(alphabet='ab#{}="\\ ,1.e+-\tN\n', max_size=20),
    ),
    max_size=8,
)


@given(pages=st.lists(LINES, max_size=4))
def test_every_page_that_is_put_together_is_read_by_prometheus_own_parser_with_each_series_once(
    pages: list[list[str]],
) -> None:
    nowhere = logging.Logger("nowhere")
    nowhere.addHandler(logging.NullHandler())
    shown = MetricsPage(FaultLog(nowhere))
    for number, lines in enumerate(pages):
        shown.add(str(number), "\n".join(lines))
    families = list(text_string_to_metric_families(shown.text))
    series = Counter(
        (sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples
    )
    assert not series or max(series.values()) == 1
    declared = Counter(tuple(line.split()[1:3]) for line in shown.text.splitlines() if line.startswith("# "))
    assert max(declared.values(), default=1) == 1


def test_an_observer_s_garbage_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Shows(Observer):
        def metrics(self) -> str:
            return "not a metric at all\n"

    observers = Observers([("bad", Shows())], clock=SimulatedClock(), budget_ms=5.0)
    for _ in range(100):
        assert observers.metrics() == ""
    assert observers.num_failures == 100
    assert len(caplog.records) == 1
