"""The longest time that running sequences waited for a step, of late: the engine's part of a gap in a stream."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from trencadis.records import StepStats

__all__ = ["LongestStep"]

_WINDOW_S: Final = 30.0


class LongestStep:
    """Two gauges: the longest time between commits while sequences ran, and the tokens of the step at its end.

    They look back for one to two windows of 30 s, and keep their values while no step runs.

    Args:
        registry: Where they are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Gauge(
            "trencadis_longest_step_seconds",
            "Longest time between two commits while sequences ran, within the last 30 to 60 s.",
            registry=registry,
        )
        self._tokens = Gauge(
            "trencadis_longest_step_tokens",
            "Tokens computed by the step that the longest time between two commits ended with.",
            registry=registry,
        )
        self._committed_s = 0.0
        self._was_running = False
        self._window_end_s = float("-inf")
        self._before = self._present = (0.0, 0)

    def note(self, stats: StepStats) -> None:
        """Take in a committed step."""
        now_s = stats.now_s
        if now_s > self._window_end_s:
            self._before, self._present = self._present, (0.0, 0)
            self._window_end_s = now_s + _WINDOW_S
        if self._was_running:
            self._present = max(self._present, (now_s - self._committed_s, stats.num_scheduled_tokens))
        self._committed_s, self._was_running = now_s, stats.num_running > 0
        seconds, tokens = max(self._before, self._present)
        self._seconds.set(seconds)
        self._tokens.set(tokens)
