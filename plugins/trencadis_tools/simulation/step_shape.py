"""What the time of a step depends on, and what a model of step times answers."""

from __future__ import annotations

from typing import Protocol

from trencadis.records import StepShape, step_shape

__all__ = ["StepShape", "StepTimes", "step_shape"]


class StepTimes(Protocol):
    """A model of step times. Pure: the same shape takes the same time."""

    def device_s(self, shape: StepShape) -> float:
        """Return how long the device computes the step, seconds; 0 for a step without tokens."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Return how long the host takes to plan, build and commit it, seconds; 0 where the device hides it."""
        ...
