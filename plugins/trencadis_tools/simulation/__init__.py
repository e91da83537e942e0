"""Real engines on simulated devices: the same plugins, a clock that jumps from event to event."""

from __future__ import annotations

from trencadis_tools.simulation.run import RequestRecord, Run
from trencadis_tools.simulation.step_shape import StepShape, StepTimes, step_shape

__all__ = ["RequestRecord", "Run", "StepShape", "StepTimes", "step_shape"]
