"""Recorded requests under another configuration: the same engine on a simulated device with step times fitted to the record.

Requests arrive, and are aborted, at the recorded times; outputs have the recorded lengths; the state of the engine when the record
begins is restored. So two configurations differ only in their decisions.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs
import msgspec
import numpy as np

from trencadis.api import Config, Engine, Registry
from trencadis.clock import SimulatedClock
from trencadis.console import Advance
from trencadis.errors import ConfigError
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, FinishedSequence, FinishReason, FloatArray, Int32Array, StepOutput, step_shape
from trencadis_tools.recorder.flight_record import (
    FlightRecord,
    RecordedArrival,
    RecordedChange,
    RecordedEnd,
    RecordedRequest,
)
from trencadis_tools.replay.replay_executor import PlannedStep, ReplayExecutor
from trencadis_tools.replay.replayed_engine import as_of_a_record, change_scheduling, replayed_engine, restore
from trencadis_tools.replay.synthetic_requests import SyntheticRequests
from trencadis_tools.simulation import DraftFacts
from trencadis_tools.simulation.drafts import Drafter, drafter_of, simulated_speculation
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times import LinearStepTimes, StepRecord, fit_step_times

__all__ = ["Served", "recorded_latencies", "recorded_step_times", "replay_with"]

_LEFT_OUT = (
    (),
    ("product_s",),
    ("product_s", "row_s", "host_row_s"),
    ("product_s", "row_s", "host_row_s", "context_s"),
)
"""Coefficients to leave out for short records that do not determine them, the least important first."""


@attrs.frozen(kw_only=True)
class Served:
    """Latencies and counts of the requests that ended in the record.

    Attributes:
        name: Name of the policy.
        num_requests: Number of requests that ended and were not aborted.
        ttft_mean_s: Mean time from arrival to the first token, of requests whose first token is in the record.
        ttft_p99_s: 99th percentile of the same times.
        tpot_mean_s: Mean time per output token after the first.
        tpot_p99_s: 99th percentile of the time per output token after the first.
        e2e_mean_s: Mean time from arrival to the end.
        e2e_p99_s: 99th percentile of the time from arrival to the end.
        num_preempted: Number of preemptions.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        duration_s: Time from the start of the record to the last end.
    """

    name: str
    num_requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    num_preempted: int
    num_cached_tokens: int
    duration_s: float


def recorded_step_times(steps: Sequence[StepRecord], *, name: str) -> LinearStepTimes:
    """Return step times fitted to the recorded ones, with as many coefficients as the steps determine.

    Args:
        steps: Steps of an exact replay, which have sizes.
        name: Name of the record's file, for messages.

    Raises:
        ConfigError: There are too few steps, or they are too similar.
    """
    causes = []
    for left_out in _LEFT_OUT:
        try:
            times = fit_step_times(steps, leave_out=left_out, source=name).times
        except ConfigError as error:
            causes.append(str(error))
        else:
            assert isinstance(times, LinearStepTimes), "they are not by bucket"
            return times
    raise ConfigError(f"{name}: no step times can be fitted: {causes[-1]}", hint="Name some with --step-times.")


def recorded_latencies(record: FlightRecord) -> Served:
    """Return the latencies and counts in the record itself. Pure."""
    ended = [
        (
            one.arrival_s,
            one.first_token_s or math.nan,
            one.finish_s,
            one.num_output_tokens,
            one.num_preemptions,
            one.num_cached_tokens,
        )
        for one in record.requests
        if _counts(one.finish_reason)
    ]
    return _served(f"{_policy(record)}, as recorded", ended, _start_s(record))


def replay_with(
    record: FlightRecord,
    config: Config,
    registry: Registry,
    *,
    step_times: StepTimes,
    name: str,
    recorded: Config,
    drafts: Mapping[str, DraftFacts] | None = None,
    may_import: bool = False,
    note: Advance | None = None,
) -> Served:
    """Serve the requests of a record under a configuration.

    Args:
        record: Record with the requests.
        config: Configuration to run: the recorded one, or another one.
        registry: Plugins of the configuration.
        step_times: Step times of the simulated device.
        name: Name of the policy in the result.
        recorded: Recorded configuration; policies that are equal in both are restored with their state.
        drafts: Acceptance of drafts by name of the speculator; None: unknown.
        may_import: Whether the record is trusted, so that import paths in its changes are followed.
        note: Called with the number of ended requests after each step that ends some; or None.

    Raises:
        TrencadisError: The engine cannot be built, or a policy broke its contract.
    """
    with as_of_a_record():
        return _replay(
            record, config, registry, step_times, name, recorded, drafts=drafts or {}, may_import=may_import, note=note
        )


def _replay(
    record: FlightRecord,
    config: Config,
    registry: Registry,
    step_times: StepTimes,
    name: str,
    recorded: Config,
    *,
    drafts: Mapping[str, DraftFacts],
    may_import: bool,
    note: Advance | None,
) -> Served:
    requests = [
        one if one.finish_reason else _shorter(one) for one in record.requests
    ]  # requests that had not ended get one more token, so that they occupy the engine no longer than recorded
    synthetic, clock = SyntheticRequests(requests, ends_by_token=True), SimulatedClock(_start_s(record))
    drafter = drafter_of(config, drafts, seed=0, step_times=step_times)
    device = _Device(record, synthetic, clock, step_times, drafter)
    simulated = attrs.evolve(
        config,
        speculation=simulated_speculation(config, drafter),
        budget=attrs.evolve(config.budget, speculation_ms=0.0),  # drafting takes simulated time
    )
    engine = replayed_engine(record, simulated, registry, clock=clock, executor=device)
    finished: list[FinishedSequence] = []
    changes = functools.partial(change_scheduling, engine, name=name, may_import=may_import)
    keeps_policy = config.scheduling == recorded.scheduling
    try:
        if keeps_policy and record.scheduling is not None:
            changes(record.scheduling)
        if record.frame is not None:
            restore(
                engine,
                record.frame,
                synthetic,
                device,
                restores_scheduling=keeps_policy,
                restores_eviction=config.eviction == recorded.eviction,
            )
        finished += _serve(engine, clock, record, synthetic, changes if keeps_policy else lambda _: None, note)
    finally:
        engine.close()
    ended = [
        (
            one.arrival_s,
            one.first_token_s or math.nan,
            one.finish_s,
            len(one.token_ids),
            one.num_preemptions,
            one.num_cached_tokens,
        )
        for one in finished
        if _counts(record.requests[int(one.request_id)].finish_reason) and _counts(one.finish_reason.value)
    ]
    return _served(name, ended, _start_s(record))


class _Device(ReplayExecutor):
    """Device that runs batches one after the other, with step times by size."""

    def __init__(
        self,
        record: FlightRecord,
        synthetic: SyntheticRequests,
        clock: SimulatedClock,
        step_times: StepTimes,
        drafter: Drafter | None,
    ) -> None:
        super().__init__(record, synthetic)
        self._drafter = drafter
        self._num_prompt_tokens = np.array([one.num_prompt_tokens for one in synthetic.recorded], np.int64)
        self._clock = clock
        self._step_times = step_times
        self._free_s = 0.0

    def pending(self, planned: PlannedStep, batch: Batch | None) -> PendingStep:
        """Return a step that ends when the device has run it; a step in flight at the start ends at once."""
        if batch is not None:
            shape = step_shape(
                batch.passes, num_new=len(batch.row_starts), has_buckets=self.capabilities.layout != "ragged"
            )
            if shape.num_tokens:
                # Fitted host times are times in which the device waited, for any number of steps in flight.
                took_s = self._step_times.host_s(shape) + self._step_times.device_s(shape)
                self._free_s = max(self._free_s, self._clock.now_s()) + took_s
        return _Step(self._clock, self._free_s, self.output(planned, num_accepted=self._num_accepted(planned)))

    def _num_accepted(self, planned: PlannedStep) -> Int32Array | int:
        """Return the number of accepted drafts of each sequence."""
        drafted = np.flatnonzero(planned.num_drafts)
        if self._drafter is None or not drafted.size:
            return 0
        numbers = np.array(planned.numbers, np.int64)[drafted]
        positions = planned.known[drafted] - self._num_prompt_tokens[numbers]
        accepted = np.zeros_like(planned.num_drafts)
        accepted[drafted] = self._drafter.num_right(numbers, positions, planned.num_drafts[drafted])
        return accepted


@attrs.frozen
class _Step:
    clock: SimulatedClock
    end_s: float
    output: StepOutput

    def wait(self) -> StepOutput:
        self.clock.advance(max(0.0, self.end_s - self.clock.now_s()))
        return self.output


def _serve(
    engine: Engine,
    clock: SimulatedClock,
    record: FlightRecord,
    synthetic: SyntheticRequests,
    change: Callable[[RecordedChange], None],
    note: Advance | None,
) -> list[FinishedSequence]:
    """Serve until all requests have ended, and return them."""
    events = deque(one for one in record.events if isinstance(one, RecordedArrival | RecordedEnd | RecordedChange))
    finished: list[FinishedSequence] = []
    while events or engine.has_work:
        while events and events[0].now_s <= clock.now_s():
            event = events.popleft()
            if isinstance(event, RecordedArrival):
                engine.add(synthetic.request(event.number))
            elif isinstance(event, RecordedChange):
                change(event)
            elif not event.is_complete:  # an output that a client found complete ends with a token here
                engine.abort(str(event.number))
        if engine.has_work:
            ended = engine.step().finished
            finished += ended
            if ended and note is not None:
                note(len(finished))
        elif events:
            clock.advance(events[0].now_s - clock.now_s())
    return finished


def _shorter(request: RecordedRequest) -> RecordedRequest:
    """Return an unfinished request as one that ends with its next token."""
    return msgspec.structs.replace(request, num_tokens=request.num_tokens + 1)


def _counts(finish_reason: str) -> bool:
    """Return whether a request was answered. Pure."""
    return finish_reason in (FinishReason.STOP.value, FinishReason.LENGTH.value)


def _start_s(record: FlightRecord) -> float:
    if record.frame is not None:
        return float(record.frame["now_s"])
    return record.events[0].now_s if record.events else 0.0


def _policy(record: FlightRecord) -> str:
    known = record.components if record.scheduling is None else record.scheduling.components
    return known["scheduling.name"][0] if "scheduling.name" in known else "policy"


def _served(name: str, ended: Sequence[tuple[float, ...]], start_s: float) -> Served:
    """Return the summary of requests: arrival, first token, end, output tokens, preemptions, cached tokens of each."""
    arrival, first, finish, num_output, num_preempted, num_cached = np.array(ended or [(math.nan,) * 6]).T
    ttft, e2e = first - arrival, finish - arrival
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = (finish - first) / (num_output - 1)
    return Served(
        name=name,
        num_requests=len(ended),
        **_summary("ttft", ttft[first >= start_s]),
        **_summary("tpot", tpot[num_output > 1]),
        **_summary("e2e", e2e),
        num_preempted=int(np.nan_to_num(num_preempted).sum()),
        num_cached_tokens=int(np.nan_to_num(num_cached).sum()),
        duration_s=float(finish.max() - start_s),
    )


def _summary(name: str, values: FloatArray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not known.size:
        return {f"{name}_mean_s": math.nan, f"{name}_p99_s": math.nan}
    return {f"{name}_mean_s": float(known.mean()), f"{name}_p99_s": float(np.percentile(known, 99))}
