"""The flight recorder: what an engine did in its last steps, in memory, to be written when something goes wrong.

    added, after_plan, after_step, left, failed ──▶ entries of the present segment     every n steps: a key frame, and a new segment
                                      entries of the one before, its frame  ──record()──▶ FlightRecord ──▶ file

A step pays for two small tuples of what the plan holds anyway; everything else is done when a record is made.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis import __version__
from trencadis.config.dump import dump_config
from trencadis.config.schema import FlightRecorderConfig
from trencadis.engine.sequences import Sequence
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.step import NOT_SUBMITTED, Obstacle, SchedulingChanged, SubmittedStep
from trencadis.errors import BackendError, InvalidRequestError, RanksLostError
from trencadis.records import FinishedSequence, FinishReason, Int32Array, Plan, StepOutput, TokenDeltas
from trencadis_tools.recorder.flight_files import FlightFiles
from trencadis_tools.recorder.flight_record import (
    ComponentCode,
    FlightRecord,
    RecordedArrival,
    RecordedAttempt,
    RecordedChange,
    RecordedCommit,
    RecordedEnd,
    RecordedEvent,
    RecordedFailure,
    RecordedRequest,
)
from trencadis_tools.recorder.key_frame import KeyFrame, RecordedLife, restore_frame, take_frame
from trencadis_tools.recorder.shared_beginnings import shared_beginnings
from trencadis_tools.recorder.trailing_blocks import TrailingBlocks

__all__ = ["FlightRecorder", "event_of", "make_recorder"]

_MAX_OBSTACLES = 16
_IS_HELD = "another record was being made, and its blocks are not in this one"


class _Segment:
    """Entries from one key frame to the next.

    Attributes:
        frame: The state before the first entry; None: the engine had just been built.
        scheduling: Scheduling in force at that moment, as a change of the configuration; None: nothing had changed.
        position: Changes of blocks before it.
        entries: In order.
        obstacles: Reasons why it cannot be replayed exactly, in words.
        lives: Requests that were in the engine at the frame, or came later, in order of arrival.
        num_token_bytes: Bytes of the tokens of those that have ended.
    """

    __slots__ = ("entries", "frame", "lives", "num_token_bytes", "obstacles", "position", "scheduling")

    def __init__(
        self,
        frame: KeyFrame | None,
        lives: list[RecordedLife],
        scheduling: RecordedChange | None = None,
        position: int = 0,
    ) -> None:
        self.frame = frame
        self.position = position
        self.scheduling = scheduling
        self.entries: list[tuple[Any, ...]] = []
        self.obstacles: list[str] = []
        self.lives = lives
        self.num_token_bytes = 0


@attrs.frozen(kw_only=True)
class _Kept:
    """What a record is made of; see :class:`~trencadis_tools.recorder.flight_record.FlightRecord`.

    Attributes:
        position: Changes of blocks before the frame.
        trail: Trailing blocks, held for this record; None: there are none, or another record holds them.
    """

    frame: KeyFrame | None
    position: int
    trail: TrailingBlocks | None
    scheduling: RecordedChange | None
    lives: list[RecordedLife]
    entries: list[tuple[Any, ...]]
    requests: list[RecordedRequest]
    tokens: list[Int32Array]
    obstacles: tuple[str, ...]
    plan_hash: str


ARRIVAL, END, ATTEMPT, COMMIT, FAILURE, CHANGE = range(6)
"""First item of an entry."""


class Unrecorded(Stage):
    """Stands in an engine whose steps are not recorded."""

    def __init__(self) -> None:
        self.answers = {"flight_record": self._refuse}

    def _refuse(self, _: Mapping[str, Any]) -> dict[str, Any]:
        raise InvalidRequestError(
            "this engine keeps no flight record.", hint="Set flight_recorder.num_steps above 0 and start it again."
        )


def make_recorder(makings: Makings) -> Stage:
    """Return the stage, or the one that stands in its place where no step is recorded."""
    settings = makings.config.flight_recorder
    if not settings.num_steps:
        return Unrecorded()
    return FlightRecorder(
        settings, components=makings.components, has_connector=makings.made("kv_connector") is not None
    )


class FlightRecorder(Stage):
    """Records one engine, on its thread.

    Args:
        settings: Table ``[flight_recorder]``: length of a segment, of which two are kept, and most bytes of the tokens of requests that
            have ended, two segments together.
        components: Code of the components in force at the start, by dotted path of the setting that names each.
        has_connector: The engine has a KV connector: no key frames are taken, and no record of it can be replayed.

    Attributes:
        frame_due: Number of the step after whose commit a key frame is taken.
    """

    def __init__(
        self, settings: FlightRecorderConfig, *, components: Mapping[str, ComponentCode], has_connector: bool = False
    ) -> None:
        self._files = FlightFiles(settings)
        self._num_steps = settings.num_steps
        self._max_bytes = settings.max_bytes // 2
        self._components = components
        self._has_connector = has_connector
        self._trail: TrailingBlocks | None = None
        self._live: dict[int, RecordedLife] = {}  # by slot
        self._num_requests = 0
        self._newest: SubmittedStep | None = None
        self._scheduling: RecordedChange | None = None
        self._obstacles: list[str] = []
        self._segments: deque[_Segment] = deque([_Segment(None, [])], maxlen=2)
        self._segment = self._segments[-1]
        self._note = self._segment.entries.append
        self.frame_due = self._num_steps
        self.answers = {"flight_record": self._answer}

    def bind(self, engine: EngineParts) -> None:
        """Record the engine from now on, with key frames unless something else than steps changes it."""
        self._engine, self._state = engine, engine.state
        self._state.keep_facts()
        self._policy: Any = engine.policy
        capabilities, tables = engine.executor.capabilities, dump_config(engine.config, secrets=False)
        if tables["cache"].pop("shared_prefixes"):
            self.obstacle(
                "cache.shared_prefixes: beginnings that all salts share are texts, which no record holds", lasts=True
            )
        self._facts: dict[str, Any] = {
            "version": __version__,
            "components": dict(self._components),
            "config": tables,
            "model": attrs.asdict(engine.model),
            "capabilities": {**attrs.asdict(capabilities), "provides": sorted(capabilities.provides)},
            "num_blocks": engine.state.blocks.num_blocks,
            "block_size": engine.state.block_size,
            "max_model_len": engine.state.max_model_len,
            "num_in_flight": engine.depth,
            "max_draft_tokens": engine.limits.max_draft_tokens,
        }
        if self._has_connector:
            self.obstacle("a KV connector loads and saves blocks at moments that no record holds", lasts=True)
        else:
            self.follow()

    def follow(self) -> None:
        """Take key frames from now on; called while the blocks are as they were when the engine was built or restored."""
        self._trail = TrailingBlocks(self._state.blocks.parts)

    def restore(self, frame: Mapping[str, Any], **known: Any) -> None:
        """Put an engine that was just built into a recorded state; see :func:`~trencadis_tools.recorder.key_frame.restore_frame`."""
        restore_frame(self._engine, frame, **known)
        self.follow()
        for slot in self._state.slot_of.values():
            self._adopt(self._state.table.sequence(slot))

    # ------------------------------------------------------------------------------------------------- moments

    def added(self, sequence: Sequence) -> str:
        """Note that a request waits."""
        life = self._adopt(sequence)
        self._note((ARRIVAL, life.record.arrival_s, life))
        return ""

    def _adopt(self, sequence: Sequence) -> RecordedLife:
        """Keep a request that is in the engine."""
        arrival_s = float(self._state.table.arrival_s[sequence.slot])
        record = _recorded(self._num_requests, sequence, arrival_s)
        life = self._live[sequence.slot] = RecordedLife(self._num_requests, sequence, record)
        self._num_requests += 1
        self._segment.lives.append(life)
        return life

    def left(self, finished: FinishedSequence) -> None:
        """Note that a request has left the engine, and whether a client gave it up or found its text complete."""
        life = self._live.pop(finished.slot, None)
        if life is None:
            return
        reason = finished.finish_reason
        is_complete = reason is FinishReason.STOP and finished.stop_token_id is None
        if is_complete or reason in (FinishReason.ABORT, FinishReason.MOVED):
            self._note((END, self._state.clock.now_s(), life, is_complete))
        life.finished, life.sequence = finished, None
        self._segment.num_token_bytes += life.tokens.nbytes + finished.token_ids.nbytes + 64 * len(life.block_hashes)
        if self._segment.num_token_bytes > self._max_bytes:
            self.frame_due = 0

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Note what the scheduler answered. Of drafts only their number is kept: their distributions lie on a device.

        Arrays and numbers, and not the plan: the garbage collector does not look at such a tuple.
        """
        now_s, policy = self._state.clock.held_s, self._policy.name
        facts = self._state.facts  # none where no plan was begun
        _, number, waiting, free = facts[0] if facts else ("begin", 0, 0, 0)
        if step is None:
            none = None
            self._note((ATTEMPT, now_s, number, none, none, none, none, none, none, waiting, free, policy))
            return
        self._newest = step
        plan = step.plan
        slots, starts, counts, drafts = plan.slots, plan.starts, plan.num_scheduled, plan.drafts
        num_drafts = None if drafts is None else drafts.num_drafts
        admitted, preempted = plan.admitted, plan.preempted
        self._note(
            (ATTEMPT, now_s, plan.step, slots, starts, counts, num_drafts, admitted, preempted, waiting, free, policy)
        )

    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Note the commit, let the trailing blocks follow, and take a key frame if it is time."""
        if step is None or output is None:
            return deltas
        plan, now_s = step.plan, step.output_s
        emitted = None if plan.drafts is None else output.num_emitted
        end_s = now_s + step.commit_s
        self._note((COMMIT, now_s, step.wait_s, end_s, step.plan_s, output.device_s, emitted, output.row_errors))
        if self._trail is not None:
            self._trail.catch_up()
        if plan.step >= self.frame_due:
            self._new_segment((self._newest or step).plan.step + 1)
        return deltas

    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """Note a step that failed, or that a strategy failed for good, and write a record of it."""
        plan, newest, kind = next(iter(plans), None), self._newest, type(error).__name__
        if plan is not None:
            is_refused = newest is not None and newest.plan is plan and newest.pending is NOT_SUBMITTED
            self._note((FAILURE, self._state.clock.now_s(), plan.step, kind, not is_refused))
            if is_refused:
                self.obstacle("a plan was refused before it ran")
            self._dump_fault(f"step {plan.step} failed: {kind}")
        elif not isinstance(error, RanksLostError):
            self.obstacle(f"a strategy failed for good: {type(error.__cause__ or error).__name__}", lasts=True)
            self._dump_fault("a strategy failed, and every live request ends")

    def hear(self, notice: Obstacle | SchedulingChanged) -> None:
        """Note what no moment tells."""
        if isinstance(notice, Obstacle):
            self.obstacle(notice.words)
            return
        now_s = self._state.clock.now_s()
        try:
            event = RecordedChange.of(now_s, notice.change, notice.components)
            self._scheduling = RecordedChange.of(now_s, notice.in_force, notice.components)
        except ValueError:
            self.obstacle("scheduling was changed by options that no record can hold", lasts=True)
        else:
            self._note((CHANGE, now_s, event))

    def obstacle(self, words: str, *, lasts: bool = False) -> None:
        """Note what keeps a record from being replayed exactly.

        Args:
            words: The obstacle, in words.
            lasts: Also later records, which do not reach back to it.
        """
        noted = self._obstacles if lasts else self._segment.obstacles
        if words not in noted and len(noted) < _MAX_OBSTACLES:
            noted.append(words)

    def _new_segment(self, next_step: int) -> None:
        """Take a key frame and begin a new segment."""
        lives, trail = list(self._live.values()), self._trail
        frame = take_frame(self._engine, lives) if trail is not None else None
        segment = _Segment(frame, lives, self._scheduling, trail.position if trail is not None else 0)
        self._segments.append(segment)
        if trail is not None:
            trail.target = self._segments[0].position
        self._segment = segment
        self._note = segment.entries.append
        self.frame_due = next_step + self._num_steps

    # --------------------------------------------------------------------------------------------------- records

    def dump(self, reason: str, cause: str = "") -> Path | None:
        """Write a record now; returns its path, or None if it could not be written. From any thread, while the engine rests or hangs."""
        return self._files.write(self.record(reason=reason, cause=cause))

    def _answer(self, _: Mapping[str, Any]) -> dict[str, Any]:
        path = self.dump("request")
        if path is None:
            raise BackendError(
                "the flight record could not be written.", hint="See the log, and flight_recorder.folder."
            )
        return {"paths": [str(path)]}

    def _dump_fault(self, cause: str) -> None:
        """Write a record of a fault, unless the last one was a moment ago; the engine does not wait for it."""
        if self._files.may_write():
            made = self._kept(waits=False)
            threading.Thread(
                target=lambda: self._files.write(self._record(made, "fault", cause)), name="trencadis-flight-record"
            ).start()

    def record(self, *, reason: str, cause: str = "") -> FlightRecord:
        """Return what is kept, as a record. O(entries + tokens + blocks)."""
        return self._record(self._kept(waits=True), reason, cause)

    def _kept(self, *, waits: bool) -> _Kept:
        """Return what a record is made of: nothing of it changes when the engine goes on, until :meth:`_record` has made one.

        Args:
            waits: For a record that is being made, which holds the trailing blocks.
        """
        trail = self._trail if self._trail is not None and self._trail.hold(waits=waits) else None
        try:
            return self._copied(trail)
        except BaseException:
            if trail is not None:
                trail.release()
            raise

    def _copied(self, trail: TrailingBlocks | None) -> _Kept:
        segments = list(self._segments)
        lives = list(dict.fromkeys(life for segment in segments for life in list(segment.lives)))
        return _Kept(
            frame=segments[0].frame,
            position=segments[0].position,
            trail=trail,
            scheduling=segments[0].scheduling,
            lives=lives,
            entries=[entry for segment in segments for entry in list(segment.entries)],
            requests=[self._request(life) for life in lives],
            tokens=[self._tokens(life) for life in lives],
            obstacles=(
                *self._obstacles,
                *dict.fromkeys(words for segment in segments for words in segment.obstacles),
            ),
            plan_hash=self._state.plan_hash,
        )

    def _record(self, kept: _Kept, reason: str, cause: str) -> FlightRecord:
        """Return the record of what was kept, and let the trailing blocks go."""
        try:
            return self._made(kept, reason, cause)
        finally:
            if kept.trail is not None:
                kept.trail.release()

    def _made(self, kept: _Kept, reason: str, cause: str) -> FlightRecord:
        numbers = {id(life): number for number, life in enumerate(kept.lives)}
        salts: dict[str, str] = {}
        for number, (request, (like, num_like)) in enumerate(
            zip(kept.requests, shared_beginnings(kept.tokens), strict=True)
        ):
            request.number, request.like, request.num_like = number, like, num_like
            if request.cache_salt is not None:
                request.cache_salt = _salt_name(request.cache_salt, salts)
        frame, obstacles = None, list(kept.obstacles)
        if kept.frame is not None:
            blocks, evictions, obstacle = ([], [], _IS_HELD) if kept.trail is None else kept.trail.state(kept.position)
            frame, more = kept.frame.encoded(kept.lives, numbers, blocks, evictions)
            obstacles += [*more, obstacle] if obstacle else more
        return FlightRecord(
            reason=reason,
            cause=cause,
            written_at=time.time(),
            plan_hash=kept.plan_hash,
            scheduling=kept.scheduling,
            **self._facts,
            frame=frame,
            obstacles=obstacles,
            requests=kept.requests,
            events=[event_of(entry, numbers) for entry in kept.entries],
        )

    @property
    def num_events(self) -> int:
        """Events of the present segment."""
        return len(self._segment.entries)

    def events(self, first: int) -> list[RecordedEvent]:
        """Return the events of the present segment from one on; requests have the numbers that they have in this engine."""
        entries = self._segment.entries
        return [event_of(entry, None) for entry in entries[first:]]

    def _request(self, life: RecordedLife) -> RecordedRequest:
        """Return a request as it is now."""
        sequence, finished = life.sequence, life.finished
        record = msgspec.structs.replace(life.record)
        if finished is not None:
            record.num_tokens = record.num_prompt_tokens + len(finished.token_ids)
            record.finish_reason, record.finish_s = finished.finish_reason.value, finished.finish_s
            record.ends_by_token = finished.stop_token_id is not None
            record.first_token_s = finished.first_token_s or 0.0
            record.num_cached_tokens, record.num_preemptions = finished.num_cached_tokens, finished.num_preemptions
        elif sequence is not None:
            table = self._state.table
            record.num_tokens = int(table.num_known_tokens[sequence.slot])
            record.first_token_s = sequence.first_token_s or 0.0
            record.num_cached_tokens = max(sequence.num_cached_tokens, 0)
            record.num_preemptions = int(table.num_preemptions[sequence.slot])
        return record

    def _tokens(self, life: RecordedLife) -> Int32Array:
        """Return all known tokens of a request."""
        sequence, finished = life.sequence, life.finished
        if finished is not None:
            return np.concatenate([life.tokens[: life.record.num_prompt_tokens], finished.token_ids])
        if sequence is None:
            return life.tokens
        return self._state.known_tokens(sequence).copy()


def _recorded(number: int, sequence: Sequence, arrival_s: float) -> RecordedRequest:
    request = sequence.original_request
    params = request.params
    return RecordedRequest(
        number=number,
        request_id=request.request_id,
        slot=sequence.slot,
        arrival_s=arrival_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_known_tokens=len(sequence.tokens),
        num_tokens=0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        wants_prompt_logprobs=params.prompt_logprobs is not None,
        tenant=request.tenant,
        cache_salt=None if request.cache_salt == request.tenant else request.cache_salt,
        priority=request.priority,
        weight=request.weight,
        ttft_target_s=request.ttft_target_s,
        tpot_target_s=request.tpot_target_s,
    )


def _salt_name(salt: str, names: dict[str, str]) -> str:
    """Return a name for a cache salt, which may be a secret: what is before a NUL is a tenant, and stays."""
    if salt not in names:
        tenant, nul, _ = salt.partition("\0")
        names[salt] = f"{tenant if nul else ''}\0{len(names)}"
    return names[salt]


def event_of(entry: tuple[Any, ...], numbers: Mapping[int, int] | None) -> RecordedEvent:
    """Return the event of an entry. Pure.

    Args:
        entry: It begins with one of the constants of this module.
        numbers: Numbers of requests, by the id of their :class:`RecordedLife`; None: those of the engine.
    """

    def number_of(life: RecordedLife) -> int:
        return life.number if numbers is None else numbers[id(life)]

    kind, now_s = entry[0], float(entry[1])
    if kind == ATTEMPT:
        return _attempt(now_s, entry)
    if kind == COMMIT:
        wait_s, end_s, plan_s, device_s, num_emitted, errors = entry[2:]
        emitted = b"" if num_emitted is None else _bytes(num_emitted)
        return RecordedCommit(
            wait_s, now_s, end_s, plan_s, float(device_s), emitted, tuple(one.index for one in errors)
        )
    if kind == ARRIVAL:
        return RecordedArrival(now_s, number_of(entry[2]))
    if kind == END:
        return RecordedEnd(now_s, number_of(entry[2]), entry[3])
    if kind == CHANGE:
        change: RecordedChange = entry[2]
        return change
    return RecordedFailure(now_s, *entry[2:])


def _attempt(now_s: float, entry: tuple[Any, ...]) -> RecordedAttempt:
    step, slots, starts, counts, num_drafts, admitted, preempted, num_waiting, num_free_blocks, policy = entry[2:]
    is_plan = slots is not None
    return RecordedAttempt(
        now_s,
        is_plan,
        step,
        _bytes(slots) if is_plan else b"",
        _bytes(starts) if is_plan else b"",
        _bytes(counts) if is_plan else b"",
        b"" if num_drafts is None else _bytes(num_drafts),
        tuple(admitted.tolist()) if is_plan else (),
        tuple(preempted.tolist()) if is_plan else (),
        num_waiting,
        int(num_free_blocks),
        policy,
    )


def _bytes(numbers: Int32Array) -> bytes:
    return numbers.astype("<i4", copy=False).tobytes()
