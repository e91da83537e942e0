"""Calls observers so that no step fails: errors are counted, and one that is too slow is switched off for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from trencadis.clock import Clock
from trencadis.engine.guard import Contained
from trencadis.engine.inspect.metrics_page import MetricsPage
from trencadis.faults import CallMeter, FaultLog
from trencadis.interfaces import Observer
from trencadis.interfaces.laws import Rule
from trencadis.records import EngineGauges, FinishedSequence, StepStats

__all__ = ["Observers"]

logger = logging.getLogger("trencadis.engine")

_WINDOW = 100
"""Calls over which the time budget is averaged."""


class _Watched(Contained[Observer]):
    """An observer, with the time that its calls in steps and its pages took: the ones take microseconds, the others milliseconds."""

    consequence = "; the run goes on, further failures are counted."
    off = ": it is switched off {how_long}."
    back = "is called again"

    def __init__(self, name: str, observer: Observer, clock: Clock, *, budget_s: float, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._num_calls, self._spent_s = 0, 0.0
        self._now_s = clock.now_s
        meter = CallMeter(
            name,
            clock=clock,
            budget_s=budget_s * _WINDOW,
            setting=f"{_WINDOW} times [observer] budget_ms",
            max_overruns=2,
            at_once=5,
        )
        super().__init__(Observer, name, observer, meter=meter)

    def _made(self, rule: Rule, call: Callable[..., Any]) -> Callable[..., Any]:
        made = super()._made(rule, call)
        if rule.method not in _IN_STEPS:
            return made

        def in_steps(record: object) -> None:
            began_s = self._now_s()
            made(record)
            self._spend(rule, self._now_s() - began_s)

        return in_steps

    def _spend(self, rule: Rule, took_s: float) -> None:
        """Add a call in a step to what the last calls took together, at most a window of them; a long one counts with its own time."""
        meter = self._meter
        self._num_calls += 1
        self._spent_s += meter.charged_s(took_s) if took_s > _LONG_S else took_s
        spent_s = self._spent_s
        if self._num_calls == _WINDOW or spent_s > meter.budget_s:
            self._num_calls, self._spent_s = 0, 0.0
        if spent_s > meter.budget_s:
            super()._note_slow(rule, spent_s, 1)

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        if rule.method not in _IN_STEPS:
            super()._note_slow(rule, took_s, num_budgets)

    def _switch_off(self, fault: str) -> None:
        if self._is_kept:
            self._faults.say(f"{self.label} is too slow", f"{self.label} {fault}; steps go on waiting for it.")
        else:
            super()._switch_off(fault)


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
        self._num_pages_refused = 0

    @property
    def num_failures(self) -> int:
        """Calls that raised, and pages that no scraper would read."""
        return self._num_pages_refused + sum([watched.num_errors for watched in self.watched])

    def __bool__(self) -> bool:
        return bool(self.watched)

    def on_step(self, stats: StepStats) -> None:
        """Show a committed step to all."""
        for watched in self.watched:
            watched.ask.on_step(stats)

    def on_request(self, finished: FinishedSequence) -> None:
        """Show a finished sequence to all."""
        for watched in self.watched:
            watched.ask.on_request(finished)

    def add_metrics(self, page: MetricsPage, gauges: EngineGauges | None = None) -> None:
        """Add what all measured to a page; what no scraper would read is left out, and counted as a failure.

        Args:
            page: Grows.
            gauges: Numbers of what the engine holds now, shown to all before; None: none.
        """
        for watched in self.watched:
            if gauges is not None:
                watched.ask.on_scrape(gauges)
            self._num_pages_refused += not page.add(watched.label, watched.ask.metrics())

    def metrics(self) -> str:
        """Return what all measured, in Prometheus' text format, one after the other."""
        page = MetricsPage(self._faults)
        self.add_metrics(page)
        return page.text

    def close(self) -> None:
        """Let all flush."""
        for watched in self.watched:
            watched.ask.close()


_IN_STEPS = frozenset({"on_step", "on_request"})
_LONG_S = 0.005
"""A call of which it is looked at whose time it was."""
