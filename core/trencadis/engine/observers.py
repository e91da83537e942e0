"""Observers, contained: what they raise is counted, what takes too long is switched off; no step fails for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trencadis.clock import Clock
from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, StepStats

__all__ = ["Observers"]

logger = logging.getLogger("trencadis.engine")

_WINDOW = 100
"""Calls over which the time budget is averaged."""


class _Watched:
    def __init__(self, name: str, observer: Observer) -> None:
        self.name = name
        self.observer = observer
        self.num_calls = 0
        self.spent_s = 0.0
        self.warned = False


class Observers:
    """Tells every observer, none of which can break the run.

    Args:
        observers: Names and observers.
        clock: For the time budget.
        budget_ms: Most milliseconds per call, on average over 100 calls.
    """

    def __init__(self, observers: Iterable[tuple[str, Observer]], *, clock: Clock, budget_ms: float) -> None:
        self._watched = [_Watched(name, observer) for name, observer in observers]
        self._clock = clock
        self._budget_s = budget_ms / 1000
        self.num_failures = 0

    def __bool__(self) -> bool:
        return bool(self._watched)

    def on_step(self, stats: StepStats) -> None:
        """Show a committed step to all."""
        for watched in tuple(self._watched):
            self._call(watched, lambda observer: observer.on_step(stats))

    def on_request(self, finished: FinishedSequence) -> None:
        """Show a finished sequence to all."""
        for watched in tuple(self._watched):
            self._call(watched, lambda observer: observer.on_request(finished))

    def metrics(self) -> str:
        """Return what all measured, in Prometheus' text format, one after the other."""
        texts: list[str] = []
        for watched in tuple(self._watched):
            self._call(watched, lambda observer: texts.append(_lines(observer.metrics())))
        return "".join(texts)

    def close(self) -> None:
        """Let all flush."""
        for watched in tuple(self._watched):
            self._call(watched, lambda observer: observer.close())

    def _call(self, watched: _Watched, call: Callable[[Observer], None]) -> None:
        start_s = self._clock.now_s()
        try:
            call(watched.observer)
        except Exception:
            self.num_failures += 1
            if not watched.warned:
                watched.warned = True
                logger.exception(
                    "Observer %s raised; the run goes on, further failures are only counted.", watched.name
                )
        watched.num_calls += 1
        watched.spent_s += self._clock.now_s() - start_s
        if watched.num_calls == _WINDOW:
            if watched.spent_s > self._budget_s * _WINDOW:
                self._watched.remove(watched)
                logger.warning(
                    "Observer %s took %.1f ms per call, more than [observer] budget_ms = %g: it is switched off.",
                    watched.name,
                    1000 * watched.spent_s / _WINDOW,
                    1000 * self._budget_s,
                )
            watched.num_calls, watched.spent_s = 0, 0.0


def _lines(text: object) -> str:
    """Return a text that ends with its last line. Pure.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"metrics() returned {type(text).__name__}, which is no text")
    return f"{text}\n" if text and not text.endswith("\n") else text
