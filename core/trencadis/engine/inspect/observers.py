"""Calls observers so that no step fails: errors are counted, and one that is too slow is switched off for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
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
    """An observer, with the time that its calls in steps and its pages took: the ones take microseconds, the others milliseconds."""

    def __init__(self, name: str, observer: Observer, clock: Clock, *, budget_s: float, is_kept: bool) -> None:
        self.name = name
        self.observer = observer
        self.is_kept = is_kept
        self.meter = CallMeter(
            name,
            clock=clock,
            budget_s=budget_s * _WINDOW,
            setting=f"{_WINDOW} times [observer] budget_ms",
            max_overruns=2,
            at_once=5,
        )
        self.num_calls = 0
        self.spent_s = 0.0


class Observers:
    """Tells every observer, none of which can break the run.

    An observer is switched off for a while once it has been too slow twice within a minute: calls in steps, if up to 100 of them take
    more than 100 budgets together; a page, if it alone does. Five times as much is enough once.

    Args:
        observers: Names and observers.
        clock: For the time budget.
        budget_ms: Most milliseconds per call in a step.
        kept: Names of those that are never switched off, only warned about.

    Attributes:
        watched: All of them.
    """

    def __init__(
        self, observers: Iterable[tuple[str, Observer]], *, clock: Clock, budget_ms: float, kept: Collection[str] = ()
    ) -> None:
        self.watched = [
            _Watched(name, observer, clock, budget_s=budget_ms / 1000, is_kept=name in kept)
            for name, observer in observers
        ]
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
        meter = watched.meter
        if meter.is_off and method != "close":
            if not meter.is_due:
                return
            meter.switch_on()
            logger.warning("%s is called again.", watched.name)
        began = meter.begin()
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
            took_s = meter.end(began)
        if method in _IN_STEPS:
            took_s = self._spent_s(watched, took_s)
        if took_s > meter.budget_s and (slow := meter.overran(method, took_s)):
            self._switch_off(watched, slow)

    def _spent_s(self, watched: _Watched, took_s: float) -> float:
        """Return what the last calls in steps took together, at most a window of them; a long one counts with its own time."""
        watched.num_calls += 1
        watched.spent_s += watched.meter.charged_s(took_s) if took_s > _LONG_S else took_s
        spent_s = watched.spent_s
        if watched.num_calls == _WINDOW or spent_s > watched.meter.budget_s:
            watched.num_calls, watched.spent_s = 0, 0.0
        return spent_s

    def _switch_off(self, watched: _Watched, fault: str) -> None:
        if watched.is_kept:
            self._faults.say(f"{watched.name} is too slow", f"{watched.name} {fault}; steps go on waiting for it.")
            return
        logger.error("%s %s: it is switched off %s.", watched.name, fault, watched.meter.switch_off(fault))


_IN_STEPS = frozenset({"on_step", "on_request"})
_LONG_S = 0.005
"""A call of which it is looked at whose time it was."""


def _show(texts: list[str], observer: Observer) -> None:
    """Add what an observer measured.

    Raises:
        TypeError: It is no text.
    """
    text: object = observer.metrics()
    if not isinstance(text, str):
        raise TypeError(f"metrics() returned {type(text).__name__}, which is no text")
    texts.append(text)
