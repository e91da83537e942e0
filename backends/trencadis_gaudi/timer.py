"""How long a step takes where it runs."""

from __future__ import annotations

from trencadis_gaudi.habana import Habana

__all__ = ["GaudiTimer"]


class GaudiTimer:
    """Measures with two events, the second of which comes after the copies of results to the host.

    Args:
        habana: The device.
    """

    is_over = False  # the device is not asked: ``wait`` waits for it

    def __init__(self, habana: Habana) -> None:
        self._start, self._end = (habana.hpu.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        """Mark the end of the launched work."""
        self._end.record()

    def wait(self) -> float:
        """Block until the end was reached and return the duration, s."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3
