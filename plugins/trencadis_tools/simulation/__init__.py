"""Real engines on simulated devices: the same plugins, a clock that jumps from event to event."""

from __future__ import annotations

from trencadis_tools.simulation.drafts import DraftFacts, load_drafts
from trencadis_tools.simulation.events import EventKind, ReplicaEvent
from trencadis_tools.simulation.fleet import simulate
from trencadis_tools.simulation.run import RequestRecord, Run
from trencadis_tools.simulation.step_shape import StepShape, StepTimes, step_shape

__all__ = [
    "DraftFacts",
    "EventKind",
    "ReplicaEvent",
    "RequestRecord",
    "Run",
    "StepShape",
    "StepTimes",
    "load_drafts",
    "simulate",
    "step_shape",
]
