"""Observers, contained: what they raise is counted, what takes too long is switched off; no step fails for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from trencadis.clock import Clock
from trencadis.engine.inspect.metrics_page import MetricsPage
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt
from trencadis.interfaces import Observer
from trencadis.records import EngineGauges, FinishedSequence, StepStats

__all__ = ["Observers"]

logger = logging.getLogger("trencadis.engine")

_WINDOW = 100
"""Calls over which the time budget is averaged."""


class _Watched:
    def __init__(self, name: str, observer: Observer, clock: Clock) -> None:
        self.name = name
        self.observer = observer
        self.meter = CallMeter(name, clock=clock)
        self.num_calls = 0
        self.spent_s = 0.0


class Observers:
    """Tells every observer, none of which can break the run.

    Args:
        observers: Names and observers.
        clock: For the time budget.
        budget_ms: Most milliseconds per call, on average over 100 calls; what 100 calls may take, fewer may not exceed.

    Attributes:
        watched: Those that are told; one that was dropped is gone from it.
    """

    def __init__(self, observers: Iterable[tuple[str, Observer]], *, clock: Clock, budget_ms: float) -> None:
        self.watched = [_Watched(name, observer, clock) for name, observer in observers]
        self._budget_s = budget_ms / 1000
        self._faults = FaultLog(logger)
        self.num_failures = 0

    def __bool__(self) -> bool:
        return bool(self.watched)

    def on_step(self, stats: StepStats) -> None:
        """Show a committed step to all."""
        for watched in tuple(self.watched):
            self._call(watched, "on_step", lambda observer: observer.on_step(stats))

    def on_request(self, finished: FinishedSequence) -> None:
        """Show a finished sequence to all."""
        for watched in tuple(self.watched):
            self._call(watched, "on_request", lambda observer: observer.on_request(finished))

    def add_metrics(self, page: MetricsPage, gauges: EngineGauges | None = None) -> None:
        """Add what all measured to a page; what no scraper would read is left out, and counted as a failure.

        Args:
            page: Grows.
            gauges: What the engine holds now, shown to all before; None: nothing.
        """
        for watched in tuple(self.watched):
            texts: list[str] = []
            if gauges is not None:
                self._call(watched, "on_scrape", lambda observer: observer.on_scrape(gauges))
            self._call(watched, "metrics", partial(_show, texts))
            for text in texts:
                self.num_failures += not page.add(watched.name, text)

    def metrics(self) -> str:
        """Return what all measured, in Prometheus' text format, one after the other."""
        page = MetricsPage(self._faults)
        self.add_metrics(page)
        return page.text

    def close(self) -> None:
        """Let all flush."""
        for watched in tuple(self.watched):
            self._call(watched, "close", lambda observer: observer.close())

    def _call(self, watched: _Watched, method: str, call: Callable[[Observer], None]) -> None:
        began = watched.meter.begin()
        try:
            call(watched.observer)
        except BaseException as error:
            reraise_interrupt(error)
            self.num_failures += 1
            said = (
                f"{watched.name} raised {as_words(error)} in {method}(); the run goes on, further failures are counted."
            )
            self._faults.say(f"{watched.name}.{method}", said, error=error)
        finally:
            took_s = watched.meter.end(began)
        watched.num_calls += 1
        watched.spent_s += took_s
        if watched.spent_s > self._budget_s * _WINDOW:
            self._drop(watched, method, took_s)
        elif watched.num_calls == _WINDOW:
            watched.num_calls, watched.spent_s = 0, 0.0

    def _drop(self, watched: _Watched, method: str, took_s: float) -> None:
        if watched in self.watched:
            self.watched.remove(watched)
        logger.error(
            "%s took %.3g s in its last %d calls, the last %.3g s in %s(), over its budget of %g ms a call ([observer] budget_ms): it "
            "is switched off.",
            watched.name,
            watched.spent_s,
            watched.num_calls,
            took_s,
            method,
            1000 * self._budget_s,
        )


def _show(texts: list[str], observer: Observer) -> None:
    """Add what an observer measured.

    Raises:
        TypeError: It is no text.
    """
    text: object = observer.metrics()
    if not isinstance(text, str):
        raise TypeError(f"metrics() returned {type(text).__name__}, which is no text")
    texts.append(text)
