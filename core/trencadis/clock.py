"""Time, handed in: the engine reads no other clock, so that a run can be replayed or simulated."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SimulatedClock", "SystemClock"]


class Clock(Protocol):
    """A source of monotonic time."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.perf_counter)
    """Seconds, as ``time.perf_counter()`` has them: the engine reads it a dozen times a step, so without a call of its own."""


class SimulatedClock:
    """A clock that moves only when told to.

    Args:
        start_s: The first reading, seconds.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the current simulated time, seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not go back: advance({seconds})")
        self._now_s += seconds
