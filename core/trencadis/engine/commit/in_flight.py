"""Steps that were submitted and are not committed, the oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trencadis.engine.commit.output_check import OutputCheck
from trencadis.engine.stage import Stages
from trencadis.engine.step import SubmittedStep
from trencadis.records import Plan

__all__ = ["StepsInFlight"]


class StepsInFlight(deque[SubmittedStep]):
    """The steps in flight of one engine; appended at the right, committed or drained from the left.

    Args:
        outputs: Waits for steps and checks what they return.
        stages: They are shown every output.

    Attributes:
        before_drain: Called before a step is drained, for one of which it is not decided yet how long it takes.
    """

    def __init__(self, outputs: OutputCheck, stages: Stages) -> None:
        super().__init__()
        self.before_drain: Callable[[], None] = lambda: None
        self._outputs = outputs
        self._stages = stages

    def drain(self) -> list[Plan]:
        """Wait for all steps, the oldest first, and drop their outputs; returns their plans."""
        plans = []
        while self:
            plans.append(self.drain_one())
        return plans

    def drain_one(self) -> Plan:
        """Wait for the oldest step and drop its output; returns its plan."""
        self.before_drain()
        step = self.popleft()
        step.is_dropped = True
        try:
            output = self._outputs.output_of(step)
        except Exception:  # the first failure is the one that is reported
            return step.plan
        for received in self._stages.received:
            received(step, output)
        return step.plan
