"""Models of step times: fitted from measured steps, or computed from the data sheet of a device."""

from __future__ import annotations

from trencadis_tools.simulation.step_times.linear import LinearStepTimes

__all__ = ["LinearStepTimes"]
