"""Contract of the noun ``observer``: sees steps and requests; can never break a run."""

from __future__ import annotations

from abc import ABC
from typing import Any

from trencadis.errors import ContractError
from trencadis.interfaces.laws import Law, law, tell, tell_always
from trencadis.records import EngineGauges, FinishedSequence, StepStats

__all__ = ["INTERFACE_VERSION", "STABILITY", "Observer"]

INTERFACE_VERSION = 1
STABILITY = "stable"


def _text(method: str, answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    raise ContractError(f"{method}() returned {type(answer).__name__}, which is no text")


class Observer(ABC):  # noqa: B024 - every method has a default
    """Watches. Engine thread, after a commit; what it raises is contained, counted, and warned about once.

    An observer is switched off for a while, with its name and the time in the log, once it has twice within a minute taken what 100
    calls may take: ``[observer] budget_ms`` on average. One call of several seconds is enough. Built-in ones are only warned about.
    """

    @tell  # noqa: B027 - optional
    def on_step(self, stats: StepStats) -> None:
        """See a committed step. Once per step; at most 50 µs."""

    @tell  # noqa: B027 - optional
    def on_request(self, finished: FinishedSequence) -> None:
        """See a sequence that left the engine, for whatever reason. Once per sequence; at most 50 µs."""

    @tell  # noqa: B027 - optional
    def on_scrape(self, gauges: EngineGauges) -> None:
        """See what the engine holds now. Right before :meth:`metrics`, also before the first step; at most 50 µs."""

    @law(Law("text", _text), otherwise="")
    def metrics(self) -> str:
        """Return what the server's ``/metrics`` is to show, in Prometheus' text format; empty: nothing.

        Engine thread, between steps, once per scrape; at most 10 ms. May be called before the first step and after ``close``. Text
        that no scraper can read is left out as a whole, and so is a family that the engine, its server or another component shows
        already: Prometheus would refuse the page. At most 4 MiB.
        """
        return ""

    @tell_always  # noqa: B027 - optional
    def close(self) -> None:
        """Flush; the engine is closing."""
