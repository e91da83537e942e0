"""Time, handed in: the engine reads no other clock, so that a run can be replayed or simulated; and how long phases of work take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from trencadis.activity import ACTIVITY
from trencadis.startup import LEDGER

__all__ = ["Clock", "Phases", "SimulatedClock", "SystemClock", "in_words"]


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


class HeldClock:
    """Stands still between two calls of :meth:`hold`: all that is decided meanwhile is decided at one moment.

    The engine holds it at each request, plan and commit, so that these moments are all that a replay has to know of time.

    Args:
        source: The clock that is read.

    Attributes:
        source: Clock by which durations are measured.
        held_s: The moment; setting it to a reading of the source is what :meth:`hold` does.
    """

    __slots__ = ("held_s", "source")

    def __init__(self, source: Clock) -> None:
        self.source = source
        self.held_s = source.now_s()

    def now_s(self) -> float:
        """Return the moment, seconds."""
        return self.held_s

    def hold(self) -> float:
        """Read the source, and return what it says."""
        self.held_s = now_s = self.source.now_s()
        return now_s


class Phases:
    """Times the phases of loading, one after the other without gaps: their times add up to that of the whole.

    The one that runs is noted in :data:`trencadis.activity.ACTIVITY`, for those who wait for it, and in :data:`trencadis.startup.LEDGER`.

    Args:
        clock: Measures.
        first: The phase that begins now.

    Attributes:
        took_s: Seconds by name, in order of their beginnings; a name that comes again goes on counting.
    """

    def __init__(self, clock: Clock, first: str) -> None:
        self._clock = clock
        self._name = first
        self._since_s = clock.now_s()
        self.took_s: dict[str, float] = {first: 0.0}
        ACTIVITY.begin_part(first)
        LEDGER.begin(first)

    def begin(self, name: str) -> None:
        """End the phase and begin another one."""
        now_s = self._clock.now_s()
        self.took_s[self._name] += now_s - self._since_s
        self.took_s.setdefault(name, 0.0)
        if name != self._name:
            ACTIVITY.begin_part(name)
            LEDGER.begin(name)
        self._name, self._since_s = name, now_s

    def note_cache(self, *, found: bool) -> None:
        """Note whether what the phase needs was in a cache; see :class:`trencadis.startup.Ledger`."""
        LEDGER.note_cache(found=found)

    def end(self) -> str:
        """Return the whole and its phases in words; what comes later is not counted: ``1.5 s: weights 1.0 s, check 0.5 s``."""
        self.begin(self._name)
        return in_words(self.took_s)


def in_words(took_s: Mapping[str, float]) -> str:
    """Return a sum and what it is made of. Pure.

    Args:
        took_s: Seconds by name.
    """
    return f"{sum(took_s.values()):.1f} s: {', '.join(f'{name} {one_s:.1f} s' for name, one_s in took_s.items())}"
