"""What observers do wrong stays theirs."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.engine.inspect.observers import Observers
from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


class Showing(Observer):
    """Shows what it is given."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def metrics(self) -> Any:
        return self.text


@pytest.mark.parametrize("text", [b"mine 1\n", None, {"mine": 1}, 3])
def test_metrics_that_are_no_text_are_left_out_and_counted(text: object, caplog: pytest.LogCaptureFixture) -> None:
    """As of a library that returns bytes."""
    observers = Observers(
        [("mine", Showing(text)), ("other", Showing("other 2"))], clock=SimulatedClock(), budget_ms=5.0
    )
    assert observers.metrics() == "other 2\n"
    assert observers.num_failures == 1
    assert f"metrics() returned {type(text).__name__}, which is no text" in caplog.text


def test_an_observer_cannot_change_what_a_client_is_given() -> None:
    class Sorts(Observer):
        def on_request(self, finished: FinishedSequence) -> None:
            finished.token_ids.sort()

    engine = make_engine(backend=FakeBackend(eos=-1), observers=[("sorts", Sorts())])
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=9)))
    assert drain(engine)["r"].token_ids.tolist() == fake_text((1, 2, 3), 9, eos=-1)
    assert engine._observers.num_failures == 1


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
