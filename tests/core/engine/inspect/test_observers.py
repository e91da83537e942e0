"""What observers do wrong stays theirs."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trencadis.clock import SimulatedClock
from trencadis.engine.inspect.observers import Observers
from trencadis.faults import switched_off
from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, Request, SamplingParams, StepStats
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.observer import step_stats


def test_an_observer_cannot_change_what_a_client_is_given() -> None:
    class Sorts(Observer):
        def on_request(self, finished: FinishedSequence) -> None:
            finished.token_ids.sort()

    engine = make_engine(backend=FakeBackend(eos=-1), observers=[("sorts", Sorts())])
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=9)))
    assert drain(engine)["r"].token_ids.tolist() == fake_text((1, 2, 3), 9, eos=-1)
    assert engine._accounting._observers.num_failures == 1


def test_a_scrape_shows_the_moment_before_the_first_step_and_after_the_last() -> None:
    observer = PrometheusObserver()
    engine = make_engine(backend=FakeBackend(eos=-1), num_blocks=64, observers=[("prometheus", observer)])

    def gauges() -> list[float]:
        engine.metrics()
        shown = observer.snapshot()
        names = ("free_blocks", "used_blocks", "running_sequences", "waiting_sequences")
        return [shown[f"trencadis_{name}"] for name in names]

    assert gauges() == [64, 0, 0, 0]
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=50)))
    assert gauges() == [64, 0, 0, 1], "no step has run since it came"
    engine.step()
    free, used, running, waiting = gauges()
    assert (free + used, running, waiting) == (64, 1, 0)
    engine.abort("r")
    drain(engine)
    assert gauges()[1:] == [0, 0, 0]


STATS = step_stats()


class Pages(Observer):
    """Its pages, or its calls in steps, take time."""

    def __init__(self, clock: SimulatedClock, *, page_s: float = 0.0, step_s: float = 0.0) -> None:
        self.clock, self.page_s, self.step_s = clock, page_s, step_s
        self.num_steps = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.clock.advance(self.step_s)

    def metrics(self) -> str:
        self.clock.advance(self.page_s)
        return "mine 1\n"


def test_pages_of_milliseconds_do_not_switch_an_observer_off_however_many_there_are() -> None:
    """Without a step between them, as of a server that has nothing to do."""
    clock = SimulatedClock()
    observers = Observers([("mine", Pages(clock, page_s=0.06))], clock=clock, budget_ms=5.0)
    assert [observers.metrics() for _ in range(500)] == ["mine 1\n"] * 500


def test_a_slow_observer_is_told_again_after_a_while() -> None:
    clock = SimulatedClock()
    observer = Pages(clock, step_s=3.0)
    observers = Observers([("mine", observer)], clock=clock, budget_ms=5.0)
    for _ in range(30):
        observers.on_step(STATS)
        clock.advance(1.0)
    assert observer.num_steps == 1
    assert [one.component for one in switched_off() if one.component == "mine"] == ["mine"]
    clock.advance(30.0)
    observer.step_s = 0.0
    for _ in range(30):
        observers.on_step(STATS)
    assert observer.num_steps == 31
    assert "mine" not in {one.component for one in switched_off()}


def test_a_built_in_observer_is_never_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    observer = Pages(clock, step_s=3.0)
    observers = Observers([("mine", observer)], clock=clock, budget_ms=5.0, kept=("mine",))
    for _ in range(30):
        observers.on_step(STATS)
    assert observer.num_steps == 30
    assert "steps go on waiting for it" in caplog.text


def test_what_is_off_is_on_the_page_of_metrics_with_a_count() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, observers=[('the "slow" one', Pages(clock, step_s=3.0))])
    before = count_of(engine.metrics())
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=4)))
    drain(engine)
    page = engine.metrics()
    assert 'trencadis_component_off{component="the \\"slow\\" one"} 1' in page.splitlines()
    assert count_of(page) == before + 1
    (row,) = [row for row in engine.answer("switched_off", {})["components"] if row["component"] == 'the "slow" one']
    assert "took 3 s in on_step()" in row["cause"]
    assert 0 < row["for_s"] <= 60


def count_of(page: str) -> float:
    families = {one.name: one for one in text_string_to_metric_families(page)}
    return families["trencadis_components_switched_off"].samples[0].value
