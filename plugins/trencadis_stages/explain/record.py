"""The step record: what the last plans decided, and why, so that it can be explained afterwards.

StepNotes ◀── scheduler and admission note reasons ── after_plan ▶ ring of the last N steps ▶ explain
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator

import attrs

from trencadis.engine.sequences import Sequence
from trencadis.engine.stage import EngineParts, Stage
from trencadis.engine.step import StepNotes, SubmittedStep
from trencadis.records import Batch, FinishedSequence, Plan

__all__ = ["Decisions", "RequestLifetime"]

_MAX_LIVES = 16384


@attrs.define(kw_only=True, eq=False)
class RequestLifetime:
    """The time of one request in the engine.

    Attributes:
        request_id: Its id.
        slot: Its slot.
        num_prompt_tokens: Tokens of its prompt.
        arrival_s: Engine clock when it came.
        born: Number of the first step record that may show it.
        died: Number of the first step record that cannot; very large while it is in the engine.
        finish_reason: Why it ended; empty before.
        num_output_tokens: What it had then.
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
        notes = self._newest_notes()
        if notes.is_idle:
            return  # it only asks what became of a transfer
        notes.number = self._next
        self._next += 1
        kept = self._notes
        if kept and kept[-1].step == notes.step:
            kept[-1] = notes
        else:
            kept.append(notes)

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
        """Take the state, read only, and what the newest plan decided."""
        self._state, self._newest_notes = engine.state, engine.notes

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
