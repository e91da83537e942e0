"""Contract of the noun ``observer``: sees steps and requests; can never break a run."""

from __future__ import annotations

from abc import ABC

from trencadis.records import FinishedSequence, StepStats

__all__ = ["INTERFACE_VERSION", "Observer"]

INTERFACE_VERSION = 1


class Observer(ABC):  # noqa: B024 - every method has a default
    """Watches. Engine thread, after a commit; what it raises is contained, counted, and warned about once.

    An observer that blows its time budget (``[observer] budget_ms`` on average over 100 calls) is switched off with a warning.
    """

    def on_step(self, stats: StepStats) -> None:  # noqa: B027 - optional
        """See a committed step. Once per step; at most 50 µs."""

    def on_request(self, finished: FinishedSequence) -> None:  # noqa: B027 - optional
        """See a sequence that left the engine, for whatever reason. Once per sequence; at most 50 µs."""

    def metrics(self) -> str:
        """Return what the server's ``/metrics`` is to show, in Prometheus' text format; empty: nothing.

        Engine thread, between steps, once per scrape; at most 10 ms. May be called before the first step and after ``close``. A name
        that the engine or its server has is not used again: Prometheus refuses the whole answer.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - optional
        """Flush; the engine is closing."""
