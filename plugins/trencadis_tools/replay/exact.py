"""Exact replay: the same requests at the same times, with a comparison of each plan to the record.

The engine runs from event to event, on a clock with the recorded times; the device returns the recorded outputs. So every plan
is made from the same state at the same time, and must be equal.
"""

from __future__ import annotations

import attrs

from trencadis.api import Config, NounConfig, Registry
from trencadis.console import Advance
from trencadis.errors import RanksLostError, StepFailedError, TrencadisError
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, StepOutput, StepShape, step_shape
from trencadis_tools.recorder.flight_record import (
    FlightRecord,
    RecordedArrival,
    RecordedAttempt,
    RecordedChange,
    RecordedCommit,
    RecordedEnd,
    RecordedEvent,
    RecordedFailure,
)
from trencadis_tools.replay.recorded_drafts import RECORDED, RecordedDrafts
from trencadis_tools.replay.replay_executor import PlannedStep, ReplayExecutor
from trencadis_tools.replay.replayed_engine import (
    ScriptedClock,
    as_of_a_record,
    change_scheduling,
    recorder_of,
    replayed_engine,
    restore,
)
from trencadis_tools.replay.synthetic_requests import SyntheticRequests
from trencadis_tools.simulation.step_times import StepRecord

__all__ = ["Difference", "ReplayedSteps", "replay_exactly"]

_NOTED_EACH = 100
"""Number of events between two progress notes."""


@attrs.frozen(kw_only=True)
class Difference:
    """First difference between a replay and its record.

    Attributes:
        event: Index of the recorded event.
        recorded: Recorded event; None: the record has ended.
        replayed: Event of the replay at this place; None: there is none.
        cause: Error of the replay in words; empty: it did not raise.
    """

    event: int
    recorded: RecordedEvent | None
    replayed: RecordedEvent | None
    cause: str = ""


@attrs.frozen(kw_only=True)
class ReplayedSteps:
    """Result of an exact replay.

    Attributes:
        num_steps: Number of equal plans.
        difference: First difference; None: all plans are equal.
        steps: Sizes and times of the committed steps.
    """

    num_steps: int
    difference: Difference | None
    steps: tuple[StepRecord, ...] = attrs.field(default=(), repr=lambda steps: f"<{len(steps)} steps>")


class _Script(ReplayExecutor):
    """Executor that returns the recorded outputs in order."""

    def __init__(self, record: FlightRecord, synthetic: SyntheticRequests, clock: ScriptedClock) -> None:
        super().__init__(record, synthetic)
        self._events = record.events
        self._clock = clock
        self._next = 0
        self._has_failed = False
        self._planned_s = self._committed_s = 0.0
        self.steps: list[StepRecord] = []

    def begin(self, event: int) -> None:
        """Continue at an event that begins a step of the engine."""
        self._next, self._has_failed = event, False

    def pending(self, planned: PlannedStep, batch: Batch | None) -> PendingStep:
        """Return the pending recorded output; set the clock to the next event if that is a plan."""
        planned_s = self._clock.now_s()
        shape = StepShape()
        if batch is not None:
            shape = step_shape(
                batch.passes, num_new=len(batch.row_starts), has_buckets=self.capabilities.layout != "ragged"
            )
            self._next += 1
            event = self.next_event()
            if isinstance(event, RecordedAttempt):
                self._clock.set(event.now_s)
        return _Pending(self, planned, shape, planned_s)

    def wait(self, planned: PlannedStep, shape: StepShape, planned_s: float) -> StepOutput:
        """Return the recorded output of the oldest step in flight; after a failure, a substitute that is discarded."""
        if self._has_failed:
            return self.output(planned)
        event = self.next_event()
        while isinstance(event, RecordedAttempt) and not event.is_plan:
            self._next += 1
            event = self.next_event()
        if isinstance(event, RecordedFailure):
            self._has_failed = True
            self._clock.set(event.now_s)
            kind = RanksLostError if event.error == RanksLostError.__name__ else StepFailedError
            raise kind(f"step {event.step} failed, as recorded")
        if isinstance(event, RecordedCommit):
            self._clock.set(event.now_s)
            begin_s, self._committed_s = max(self._committed_s, planned_s), event.now_s
            if shape.num_tokens:
                self.steps.append(
                    StepRecord(
                        shape=shape,
                        now_s=event.now_s,
                        wall_s=event.now_s - begin_s,
                        device_s=event.device_s,
                        plan_s=event.plan_s,
                        commit_s=event.end_s - event.now_s,
                    )
                )
            return self.output(planned, event)
        return self.output(planned)

    def next_event(self) -> RecordedEvent | None:
        """Return the next event; None at the end."""
        return self._events[self._next] if self._next < len(self._events) else None


@attrs.frozen
class _Pending:
    script: _Script
    planned: PlannedStep
    shape: StepShape
    planned_s: float

    def wait(self) -> StepOutput:
        return self.script.wait(self.planned, self.shape, self.planned_s)


def replay_exactly(
    record: FlightRecord,
    config: Config,
    registry: Registry,
    *,
    name: str = "the record",
    may_import: bool = False,
    note: Advance | None = None,
) -> ReplayedSteps:
    """Replay a record, up to the first plan that differs.

    Args:
        record: Record to replay.
        config: Recorded configuration.
        registry: Plugins of the configuration.
        name: Name of the file, for messages.
        may_import: Whether the file is trusted, so that import paths in its changes are followed.
        note: Called from time to time with the number of replayed events; or None.

    Raises:
        ConfigError: The engine cannot continue with the content of the record.
        TrencadisError: The engine cannot be built.
    """
    with as_of_a_record():
        return _replay(record, config, registry, name=name, may_import=may_import, note=note)


def _with_recorded_drafts(record: FlightRecord, config: Config, registry: Registry, script: _Script) -> Config:
    """Return the configuration with a registered speculator for recorded drafts; unchanged if there are none."""
    if not record.max_draft_tokens:
        return attrs.evolve(config, speculation=NounConfig(name="none"))
    drafts = RecordedDrafts(record.max_draft_tokens)
    drafts.next_event = script.next_event
    registry.register(drafts)
    return attrs.evolve(
        config,
        speculation=NounConfig(name=RECORDED),
        draft_length=NounConfig(name="fixed"),
        acceptance=NounConfig(name="match"),
    )


def _replay(
    record: FlightRecord,
    config: Config,
    registry: Registry,
    *,
    name: str,
    may_import: bool,
    note: Advance | None,
) -> ReplayedSteps:
    synthetic, clock = SyntheticRequests(record.requests), ScriptedClock()
    script = _Script(record, synthetic, clock)
    config = _with_recorded_drafts(record, config, registry, script)
    engine = replayed_engine(record, config, registry, clock=clock, executor=script)
    recorder = recorder_of(engine)
    number, num_steps, num_noted = 0, 0, 0
    try:
        if record.scheduling is not None:
            clock.set(record.scheduling.now_s)
            change_scheduling(engine, record.scheduling, name=name, may_import=may_import)
        if record.frame is not None:
            clock.set(record.frame["now_s"])
            restore(engine, record.frame, synthetic, script)
        while number < len(record.events):
            if note is not None and number // _NOTED_EACH > num_noted:
                num_noted = number // _NOTED_EACH
                note(number)
            event = record.events[number]
            clock.set(event.now_s)
            first = recorder.num_events
            match event:
                case RecordedArrival():
                    engine.add(synthetic.request(event.number))
                    number += 1
                case RecordedEnd():
                    end = engine.stop if event.is_complete else engine.abort
                    end(str(event.number))
                    number += 1
                case RecordedChange():
                    change_scheduling(engine, event, name=name, may_import=may_import)
                    number += 1
                case _:
                    engine.is_paused = not isinstance(event, RecordedAttempt)
                    script.begin(number)
                    engine.step()
                    if not (made := recorder.events(first)):
                        return _differs(num_steps, number, event, None)
                    for one in made:
                        recorded = record.events[number] if number < len(record.events) else None
                        if recorded is None:
                            break  # the event was written within a step
                        if not _is_same(recorded, one):
                            return _differs(num_steps, number, recorded, one)
                        num_steps += isinstance(one, RecordedAttempt) and one.is_plan
                        number += 1
    except TrencadisError as error:
        return _differs(num_steps, number, record.events[number], None, cause=str(error))
    finally:
        engine.is_paused = True
        engine.close()
    return ReplayedSteps(num_steps=num_steps, difference=None, steps=tuple(script.steps))


def _differs(
    num_steps: int, event: int, recorded: RecordedEvent | None, replayed: RecordedEvent | None, *, cause: str = ""
) -> ReplayedSteps:
    found = Difference(event=event, recorded=recorded, replayed=replayed, cause=cause)
    return ReplayedSteps(num_steps=num_steps, difference=found)


def _is_same(recorded: RecordedEvent, replayed: RecordedEvent) -> bool:
    if isinstance(recorded, RecordedAttempt) and isinstance(replayed, RecordedAttempt):
        return recorded.schedule == replayed.schedule
    return type(recorded) is type(replayed)
