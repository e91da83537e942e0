"""The step record: what the last plans decided, and why, so that it can be explained afterwards.

scheduler, admission ── EngineState.facts ──▶ after_plan() ──▶ StepNotes ──▶ ring of the last N steps ──▶ explain
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from trencadis.engine.sequences import Sequence
from trencadis.engine.stage import EngineParts, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.interfaces import TokenSplit
from trencadis.records import Batch, Bucket, FinishedSequence, FinishReason, Int32Array, Plan

__all__ = ["Decisions", "Preemption", "RequestLifetime", "StepNotes", "Stop"]

_EMPTY = np.empty(0, np.int32)
_MAX_LIVES = 16384
_MAX_RANKS = 4096
_MAX_SKIPPED = 4096


@attrs.frozen
class Stop:
    """Where admission stopped.

    Attributes:
        reason: ``blocks``, ``rows`` or ``tokens``: what ran out.
        slot: The first that lacked it; -1: none was tried.
        num_needed: Blocks it takes; 0 if blocks are not the reason.
        num_free: Blocks that there were.
    """

    reason: str
    slot: int = -1
    num_needed: int = 0
    num_free: int = 0


@attrs.frozen
class Preemption:
    """Who lost its blocks.

    Attributes:
        slot: The victim.
        for_slot: The waiting sequence that was let in; -1: decodes needed blocks.
        num_needed: Blocks that decodes needed; 0 if it gave way.
        num_free: Blocks that there were.
    """

    slot: int
    for_slot: int = -1
    num_needed: int = 0
    num_free: int = 0


class StepNotes:
    """What one plan decided. Its arrays must not be changed.

    Attributes:
        number: Number of the note, growing.
        step: Number of the plan.
        now_s: Engine clock when it was made.
        num_waiting: Sequences that waited then.
        num_free_blocks: Blocks that could be had then.
        policy: Name of the policy.
        split: Tokens that the policy gave decodes and prefills, or None if it was not asked.
        num_left: Tokens left for admission; -1: none could have been admitted.
        running: Slots that ran after planning.
        active: Running slots with a token to compute; None: not looked at.
        decodes: Active slots that decode.
        slots: Who is in the plan.
        starts: Computed tokens of each before.
        counts: Tokens of each.
        admitted: Slots that were admitted.
        order: Waiting slots in the order of admission, the first 4096; None: the policy was not asked.
        stop: Where admission stopped, or None.
        skipped: Why a waiting slot was passed over.
        held_back: Waiting slots that a stage held back in an earlier plan, and was not asked about in this one.
        preemptions: Who lost its blocks.
        aside: Slots that stood aside, and why.
        alone: Slot that runs alone after a failed step, or -1.
        passes: Bucket of each pass, and which of ``slots`` ran in it.
        error: Why the step failed; empty: it did not.
    """

    # Defaults of the class, so that making one costs nothing and a plain step sets only what it has.
    number = 0
    step = -1
    now_s = 0.0
    num_waiting = 0
    num_free_blocks = 0
    policy = ""
    split: TokenSplit | None = None
    num_left = -1
    running: Int32Array = _EMPTY
    active: Int32Array | None = None
    decodes: Int32Array = _EMPTY
    slots: Int32Array = _EMPTY
    starts: Int32Array = _EMPTY
    counts: Int32Array = _EMPTY
    admitted: Collection[int] = ()
    order: Int32Array | None = None
    stop: Stop | None = None
    skipped: dict[int, str] | None = None
    held_back: Int32Array = _EMPTY
    preemptions: tuple[Preemption, ...] = ()
    aside: Mapping[int, str] = MappingProxyType({})
    alone = -1
    passes: tuple[tuple[Bucket, Int32Array], ...] = ()
    error = ""


@attrs.define(kw_only=True, eq=False)
class RequestLifetime:
    """The time of one request in the engine.

    Attributes:
        request_id: Id of the request.
        slot: Slot of its sequence.
        num_prompt_tokens: Tokens of its prompt.
        arrival_s: Engine clock when it came.
        born: Number of the first step record that may show it.
        died: Number of the first step record that cannot; very large while it is in the engine.
        finish_reason: Why it ended; empty before.
        num_output_tokens: Output tokens that it had then.
        error: The error of its end; empty: there was none.
    """

    request_id: str
    slot: int
    num_prompt_tokens: int
    arrival_s: float
    born: int
    died: int = sys.maxsize
    finish_reason: str = ""
    num_output_tokens: int = 0
    error: str = ""


class Decisions(Stage):
    """Keeps the notes of the last steps and the lives of their requests.

    Args:
        num_steps: How many steps to keep, at least 1.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._notes: deque[StepNotes] = deque(maxlen=num_steps)
        self._next = 0
        self._newest: dict[str, RequestLifetime] = {}
        self._ended: deque[RequestLifetime] = deque()

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Keep the notes of a plan; those of one that came to nothing only until the next, which has the same step."""
        notes, state = StepNotes(), self._state
        for fact, *values in state.facts:
            match fact:
                case "begin":
                    notes.step, notes.num_waiting, notes.num_free_blocks = values
                case "split":
                    notes.split, notes.active, notes.decodes = values
                case "left":
                    (notes.num_left,) = values
                case "order":
                    (order,) = values
                    notes.order = order if len(order) <= _MAX_RANKS else order[:_MAX_RANKS].copy()
                case "skip":
                    skipped = notes.skipped = notes.skipped or {}
                    if len(skipped) < _MAX_SKIPPED:
                        skipped[values[0]] = values[1]
                case "held back":
                    (notes.held_back,) = values
                case "stop":
                    notes.stop = Stop(*values)
                case "preempt":
                    notes.preemptions += (Preemption(*values),)
                case "alone":
                    (notes.alone,) = values
        if step is not None:
            plan = step.plan
            notes.slots, notes.starts, notes.counts = plan.slots, plan.starts, plan.num_scheduled
            notes.admitted = plan.admitted
        if not (notes.slots.size or state.slot_of or self._has_failed()):
            return  # it only asks what became of a transfer
        notes.number, notes.now_s, notes.policy = self._next, state.clock.held_s, self._policy.name
        notes.running = state.running
        if state.aside:
            notes.aside = {slot: aside.reason for slot, aside in state.aside.items()}
        self._next += 1
        kept = self._notes
        if kept and kept[-1].step == notes.step:
            kept[-1] = notes
        else:
            kept.append(notes)

    def _has_failed(self) -> bool:
        return any(one.finish_reason is FinishReason.ERROR for one in self._ended_outside)

    def after_build(self, step: SubmittedStep, batch: Batch) -> Batch | None:
        """Note the buckets of the newest plan."""
        passes = batch.passes
        if len(passes) == 1 and self._notes:  # nearly always, and three times as fast
            one = passes[0]
            self._notes[-1].passes = ((one.bucket, one.indices),)
        elif passes and self._notes:
            self._notes[-1].passes = tuple([(one.bucket, one.indices) for one in passes])
        return None

    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """Note that a step failed."""
        step = next((plan.step for plan in plans), -1)
        for notes in reversed(self._notes):
            if notes.step == step and len(notes.slots):
                notes.error = str(error)
                return

    # --------------------------------------------------------------------------------------------------- requests

    def bind(self, engine: EngineParts) -> None:
        """Take the state, read only."""
        self._state, self._ended_outside = engine.state, engine.ended
        self._policy: Any = engine.policy
        engine.state.keep_facts()

    def added(self, sequence: Sequence) -> str:
        """Note that a request waits."""
        request = sequence.request
        self._newest[request.request_id] = RequestLifetime(
            request_id=request.request_id,
            slot=sequence.slot,
            num_prompt_tokens=len(request.prompt_token_ids),
            arrival_s=float(self._state.table.arrival_s[sequence.slot]),
            born=self._next,
        )
        return ""

    def left(self, finished: FinishedSequence) -> None:
        """Note that a request ended; forgets those that no kept step knows, and the oldest beyond 16384."""
        life = self._newest.get(finished.request_id)
        if life is None or life.finish_reason:
            return
        life.died, life.finish_reason = self._next, finished.finish_reason.value
        life.num_output_tokens, life.error = len(finished.token_ids), finished.error
        self._ended.append(life)
        oldest = self._notes[0].number if self._notes else 0
        while self._ended and (self._ended[0].died <= oldest or len(self._ended) > _MAX_LIVES):
            gone = self._ended.popleft()
            if self._newest.get(gone.request_id) is gone:
                del self._newest[gone.request_id]

    # --------------------------------------------------------------------------------------------------- questions

    @property
    def notes(self) -> tuple[StepNotes, ...]:
        """Notes of the kept steps, oldest first."""
        return tuple(self._notes)

    def life(self, request_id: str) -> RequestLifetime | None:
        """Return the newest request of that id, or None if it was never seen or is forgotten."""
        return self._newest.get(request_id)

    def family(self, request_id: str) -> list[RequestLifetime]:
        """Return the requests that the engine ran for a client's: of that id, or of ids that begin with it and ``/`` or ``-``."""
        own = self._newest.get(request_id)
        if own is not None:
            return [own]
        return [life for name, life in self._newest.items() if name.startswith((f"{request_id}/", f"{request_id}-"))]

    def lives(self) -> Iterator[RequestLifetime]:
        """Yield all that are known, those whose id was used again included."""
        yield from self._ended
        yield from (life for life in self._newest.values() if not life.finish_reason)
