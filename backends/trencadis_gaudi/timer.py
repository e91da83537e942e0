"""How long a step takes where it runs."""

from __future__ import annotations

from typing import Any

from trencadis.clock import Clock
from trencadis_gaudi.habana import Habana

__all__ = ["GaudiTimer"]


class GaudiTimer:
    """Measures with events on a Gaudi, with the clock on the emulated device, which works inline.

    Args:
        habana: The device.
        clock: Read for the emulated device.
    """

    def __init__(self, habana: Habana, clock: Clock) -> None:
        self._clock = clock
        self._events: tuple[Any, Any] | None = None
        if habana.emulated is None:
            self._events = (habana.hpu.Event(enable_timing=True), habana.hpu.Event(enable_timing=True))
            self._events[0].record()
        self._start_s = clock.now_s()
        self._seconds = 0.0

    def stop(self) -> None:
        """Mark the end of the launched work."""
        if self._events is not None:
            self._events[1].record()
        self._seconds = self._clock.now_s() - self._start_s

    def wait(self) -> float:
        """Block until the end was reached and return the duration, s."""
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
