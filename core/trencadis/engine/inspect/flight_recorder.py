"""The flight recorder: what an engine did in its last steps, in memory, to be written when something goes wrong.

    add, plan, commit, fail ──note──▶ entries of the present segment         every n steps: a key frame, and a new segment
                                      entries of the one before, its frame  ──record()──▶ FlightRecord ──▶ file

A step pays for two small tuples of what the plan and its notes hold anyway; everything else is done when a record is made.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis.engine.inspect.flight_files import FlightFiles
from trencadis.engine.inspect.key_frame import KeyFrame, RecordedLife
from trencadis.engine.inspect.shared_beginnings import shared_beginnings
from trencadis.engine.inspect.trailing_blocks import TrailingBlocks
from trencadis.engine.sequences import Sequence as EngineSequence
from trencadis.engine.state import EngineState
from trencadis.engine.step import StepNotes
from trencadis.records import FinishedSequence, FinishReason, Int32Array, Plan, Request
from trencadis.records.flight_record import (
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

__all__ = ["FlightFacts", "FlightRecorder", "event_of"]


_MAX_OBSTACLES = 16
_IS_HELD = "another record was being made, and its blocks are not in this one"


@attrs.frozen(kw_only=True)
class FlightFacts:
    """What of an engine does not change while it lives; see :class:`~trencadis.records.flight_record.FlightRecord`.

    Attributes:
        version: Of Trencadís.
        config: Tables of the core, without secrets and texts.
        components: Code of the components in force at the start, by dotted path of the setting that names each.
        model: Facts of the model.
        capabilities: Of the backend.
        num_in_flight: Steps that may be in flight at once.
        max_draft_tokens: Drafts of a sequence in a step; 0 without speculation.
        obstacles: Why no record of this engine can be replayed; empty: it can.
    """

    version: str
    config: Mapping[str, Any]
    components: Mapping[str, ComponentCode]
    model: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    num_in_flight: int
    max_draft_tokens: int = 0
    obstacles: tuple[str, ...] = ()


class _Segment:
    """Entries from one key frame to the next.

    Attributes:
        frame: The state before the first entry; None: the engine had just been built.
        scheduling: Scheduling in force at that moment, as a change of the configuration; None: nothing had changed.
        position: Changes of blocks before it.
        entries: In order.
        obstacles: What of it cannot be replayed, in words.
        lives: Requests that were in the engine at the frame, or came later, in order of arrival.
        num_token_bytes: Of those that have ended.
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
    """What a record is made of; see :class:`~trencadis.records.flight_record.FlightRecord`.

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


class FlightRecorder:
    """Records one engine, on its thread.

    Args:
        state: The engine's.
        facts: Of the engine.
        files: Where records are written.
        num_steps: Length of a segment, of which two are kept.
        max_bytes: Of the tokens of requests that have ended, two segments together.
        plan_hash: Returns the hash of the plan in force.

    Attributes:
        note: Adds an entry: a tuple that begins with one of the constants of this module.
        take_frame: Returns a copy of the engine's state but for its blocks, given the requests in it; see :meth:`follow`.
        frame_due: Number of the step after whose commit a key frame is taken.
    """

    def __init__(
        self,
        state: EngineState,
        facts: FlightFacts,
        files: FlightFiles,
        *,
        num_steps: int,
        max_bytes: int,
        plan_hash: Callable[[], str] = lambda: "",
    ) -> None:
        self._state = state
        self._facts = facts
        self._files = files
        self._num_steps = num_steps
        self._max_bytes = max_bytes // 2
        self.take_frame: Callable[[Sequence[RecordedLife]], KeyFrame | None] = lambda _: None
        self._trail: TrailingBlocks | None = None
        self._plan_hash = plan_hash
        self._live: dict[int, RecordedLife] = {}  # by slot
        self._num_requests = 0
        self._scheduling: RecordedChange | None = None
        self._obstacles: list[str] = []
        self._segments: deque[_Segment] = deque([_Segment(None, [])], maxlen=2)
        self._segment = self._segments[-1]
        self.note = self._segment.entries.append
        self.frame_due = num_steps

    def follow(self, take_frame: Callable[[Sequence[RecordedLife]], KeyFrame | None]) -> None:
        """Take key frames from now on; called once nothing but steps changes the engine.

        Args:
            take_frame: Returns a copy of the engine's state but for its blocks, given the requests in it.
        """
        self.take_frame = take_frame
        self._trail = TrailingBlocks(self._state.blocks.parts)

    # --------------------------------------------------------------------------------------------------- notes

    def added(self, sequence: EngineSequence) -> None:
        """Note that a request waits."""
        life = self.adopted(sequence)
        self.note((ARRIVAL, life.record.arrival_s, life))

    def adopted(self, sequence: EngineSequence) -> RecordedLife:
        """Keep a request that is in the engine."""
        slot = sequence.slot
        record = _recorded(
            self._num_requests, sequence.original_request, sequence, float(self._state.table.arrival_s[slot])
        )
        life = self._live[slot] = RecordedLife(self._num_requests, sequence, record)
        self._num_requests += 1
        self._segment.lives.append(life)
        return life

    def ended(self, slot: int, reason: FinishReason) -> None:
        """Note that a client gave a request up, or found its text complete; it ends right after."""
        life = self._live.get(slot)
        if life is not None:
            self.note((END, self._state.clock.now_s(), life, reason is FinishReason.STOP))

    def finished(self, finished: FinishedSequence) -> None:
        """Note that a request has left the engine."""
        life = self._live.pop(finished.slot, None)
        if life is not None:
            life.finished, life.sequence = finished, None
            self._segment.num_token_bytes += (
                life.tokens.nbytes + finished.token_ids.nbytes + 64 * len(life.block_hashes)
            )
            if self._segment.num_token_bytes > self._max_bytes:
                self.frame_due = 0

    def planned(self, now_s: float, notes: StepNotes, plan: Plan | None) -> None:
        """Note what the scheduler answered. Of drafts only their number is kept: their distributions lie on a device.

        Arrays and numbers, and neither the plan nor its notes: the garbage collector does not look at such a tuple.
        """
        waiting, free, policy = notes.num_waiting, notes.num_free_blocks, notes.policy
        if plan is None:
            none = None
            self.note((ATTEMPT, now_s, notes.step, none, none, none, none, none, none, waiting, free, policy))
            return
        slots, starts, counts, drafts = plan.slots, plan.starts, plan.num_scheduled, plan.drafts
        num_drafts = None if drafts is None else drafts.num_drafts
        admitted, preempted = plan.admitted, plan.preempted
        self.note(
            (ATTEMPT, now_s, plan.step, slots, starts, counts, num_drafts, admitted, preempted, waiting, free, policy)
        )

    def changed(
        self, change: Mapping[str, Any], in_force: Mapping[str, Any], components: Mapping[str, ComponentCode]
    ) -> None:
        """Note that scheduling was changed.

        Args:
            change: The table of the change.
            in_force: Scheduling in force now, as a change of the configuration.
            components: Code of the components that schedule now, by dotted path of the setting that names each.
        """
        now_s = self._state.clock.now_s()
        try:
            event = RecordedChange.of(now_s, change, components)
            self._scheduling = RecordedChange.of(now_s, in_force, components)
        except ValueError:
            self.obstacle("scheduling was changed by options that no record can hold", lasts=True)
        else:
            self.note((CHANGE, now_s, event))

    def obstacle(self, words: str, *, lasts: bool = False) -> None:
        """Note what keeps a record from being replayed exactly.

        Args:
            words: What.
            lasts: Also later records, which do not reach back to it.
        """
        noted = self._obstacles if lasts else self._segment.obstacles
        if words not in noted and len(noted) < _MAX_OBSTACLES:
            noted.append(words)

    def committed(self, step: int, next_step: int) -> None:
        """Let the trailing blocks follow, and take a key frame if it is time; called between two steps, after a commit.

        Args:
            step: Number of the step that was committed.
            next_step: Number of the next one to be planned.
        """
        if self._trail is not None:
            self._trail.catch_up()
        if step >= self.frame_due:
            self._new_segment(next_step)

    def _new_segment(self, next_step: int) -> None:
        """Take a key frame and begin a new segment."""
        lives, trail = list(self._live.values()), self._trail
        segment = _Segment(self.take_frame(lives), lives, self._scheduling, trail.position if trail else 0)
        self._segments.append(segment)
        if trail is not None:
            trail.target = self._segments[0].position
        self._segment = segment
        self.note = segment.entries.append
        self.frame_due = next_step + self._num_steps

    # --------------------------------------------------------------------------------------------------- records

    def dump(self, reason: str, cause: str = "") -> Path | None:
        """Write a record now; returns its path, or None if it could not be written. From any thread, while the engine rests or hangs."""
        return self._files.write(self.record(reason=reason, cause=cause))

    def dump_fault(self, cause: str) -> None:
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
                *self._facts.obstacles,
                *self._obstacles,
                *dict.fromkeys(words for segment in segments for words in segment.obstacles),
            ),
            plan_hash=self._plan_hash(),
        )

    def _record(self, kept: _Kept, reason: str, cause: str) -> FlightRecord:
        """Return the record of what was kept, and let the trailing blocks go."""
        try:
            return self._made(kept, reason, cause)
        finally:
            if kept.trail is not None:
                kept.trail.release()

    def _made(self, kept: _Kept, reason: str, cause: str) -> FlightRecord:
        state, facts = self._state, self._facts
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
            version=facts.version,
            plan_hash=kept.plan_hash,
            components=dict(facts.components),
            config=dict(facts.config),
            scheduling=kept.scheduling,
            model=dict(facts.model),
            capabilities=dict(facts.capabilities),
            num_blocks=state.blocks.num_blocks,
            block_size=state.block_size,
            max_model_len=state.max_model_len,
            num_in_flight=facts.num_in_flight,
            max_draft_tokens=facts.max_draft_tokens,
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


def _recorded(number: int, request: Request, sequence: EngineSequence, arrival_s: float) -> RecordedRequest:
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
        entry: See :attr:`FlightRecorder.note`.
        numbers: Of requests, by the id of their :class:`RecordedLife`; None: those of the engine.
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
