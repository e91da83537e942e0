"""Duration of a step on the device."""

from __future__ import annotations

from trencadis_gaudi.habana import Habana

__all__ = ["GaudiTimer"]


class GaudiTimer:
    """Measures with two events, the second of which follows the copies of results to the host.

    Args:
        habana: Device of the events.
    """

    is_over = False  # the device is not polled; ``wait`` blocks

    def __init__(self, habana: Habana) -> None:
        self._start, self._end = (habana.hpu.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        """Record the event after the launched work."""
        self._end.record()

    def wait(self) -> float:
        """Wait for the end and return the duration, seconds."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3
