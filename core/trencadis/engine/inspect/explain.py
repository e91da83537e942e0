"""From the step record to the story of one request. Pure; reads what was noted, decides nothing.

Some milliseconds for a thousand steps, on the engine's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from trencadis.engine.inspect.decisions import Decisions, Life, StepNotes
from trencadis.engine.inspect.verdict import Verdict, verdict_of
from trencadis.engine.sequence import SequenceState
from trencadis.engine.state import EngineState
from trencadis.errors import InvalidRequestError
from trencadis.records import Bucket, Explanation, Range, Span, UnifiedBucket

__all__ = ["explain_request"]

_MAX_BUCKETS = 4


def explain_request(request_id: str, decisions: Decisions, state: EngineState) -> dict[str, Any]:
    """Return the explanations of what the engine ran for a request, as a table: ``requests``, ``oldest_step``, ``newest_step``.

    Args:
        request_id: The engine's, or a client's of which the engine's begin with it.
        decisions: The step record.
        state: Says what became of live ones.

    Raises:
        InvalidRequestError: It was never seen, or no kept step knows it any more.
    """
    notes = decisions.notes
    family = decisions.family(request_id)
    if not family:
        if not decisions.num_steps:
            raise InvalidRequestError(
                "no step is recorded: engine.explain_steps is 0.", hint="Set it, and start again."
            )
        raise InvalidRequestError(
            f"request {request_id!r} is not known: it was never seen, or it ended before the last {decisions.num_steps} steps.",
            hint="Raise engine.explain_steps to keep more.",
        )
    names = _Names(decisions)
    return {
        "oldest_step": notes[0].step if notes else None,
        "newest_step": notes[-1].step if notes else None,
        "requests": [attrs.asdict(_explanation(life, notes, names, state)) for life in family],
    }


def _explanation(life: Life, notes: tuple[StepNotes, ...], names: _Names, state: EngineState) -> Explanation:
    known = [one for one in notes if life.born <= one.number < life.died]
    where, num_output = "finished", life.num_output_tokens
    slot = state.slot_of.get(life.request_id)
    if not life.finish_reason and slot is not None:
        sequence = state.table.sequence(slot)
        where = "loading" if sequence.state is SequenceState.PARKED else sequence.state.name.lower()
        num_output = len(state.known_tokens(sequence)) - life.num_prompt_tokens
    return Explanation(
        request_id=life.request_id,
        state=where,
        finish_reason=life.finish_reason,
        error=life.error,
        num_prompt_tokens=life.num_prompt_tokens,
        num_output_tokens=num_output,
        is_complete=not notes or notes[0].number <= life.born,
        spans=tuple(_spans(life, known, names)),
    )


class _Names:
    """Request ids by slot and time: a slot has many requests, one after the other."""

    def __init__(self, decisions: Decisions) -> None:
        self._lives: dict[int, list[Life]] = defaultdict(list)
        for life in decisions.lives():
            self._lives[life.slot].append(life)

    def of(self, slot: int, number: int) -> str:
        """Return who had a slot when a note was made; empty: nobody who is known."""
        lives = self._lives.get(slot, ())
        return next((life.request_id for life in lives if life.born <= number < life.died), "")


def _spans(life: Life, notes: list[StepNotes], names: _Names) -> Iterator[Span]:
    """Yield the steps, those of equal outcome as one."""
    span: Span | None = None
    for one in notes:
        verdict = verdict_of(life, one)
        other = names.of(verdict.other, one.number) if verdict.other >= 0 else ""
        new = _span(life, one, verdict, other)
        if span is None:
            span = new
        elif _is_same(span, new):
            span = _merged(span, new)
        else:
            yield span
            span = new
    if span is not None:
        yield span


def _span(life: Life, notes: StepNotes, verdict: Verdict, other: str) -> Span:
    since_s = round(notes.now_s - life.arrival_s, 6)
    free = verdict.num_free if verdict.num_needed else notes.num_free_blocks
    return Span(
        first_step=notes.step,
        last_step=notes.step,
        num_steps=1,
        first_s=since_s,
        last_s=since_s,
        outcome=verdict.outcome,
        reason=verdict.reason,
        policy=notes.policy,
        other=other,
        num_tokens=verdict.num_tokens,
        tokens=(verdict.start, verdict.start + verdict.num_tokens) if verdict.num_tokens else None,
        rank=_point(verdict.rank) if verdict.rank else None,
        num_waiting=_point(notes.num_waiting),
        num_running=_point(len(notes.running)),
        budget_left=_point(notes.num_left) if notes.num_left >= 0 else None,
        blocks_needed=_point(verdict.num_needed) if verdict.num_needed else None,
        blocks_free=_point(free),
        buckets=_buckets(notes, verdict.index),
    )


def _is_same(span: Span, new: Span) -> bool:
    """Return whether a step goes on with a span. Pure."""
    same = (span.outcome, span.reason, span.policy, span.other) == (new.outcome, new.reason, new.policy, new.other)
    return same and new.outcome not in {"preempted", "failed"}


def _merged(span: Span, new: Span) -> Span:
    return attrs.evolve(
        span,
        last_step=new.last_step,
        num_steps=span.num_steps + 1,
        last_s=new.last_s,
        num_tokens=span.num_tokens + new.num_tokens,
        tokens=(span.tokens[0], new.tokens[1]) if span.tokens and new.tokens else None,
        rank=_joined(span.rank, new.rank),
        num_waiting=_joined(span.num_waiting, new.num_waiting),
        num_running=_joined(span.num_running, new.num_running),
        budget_left=_joined(span.budget_left, new.budget_left),
        blocks_needed=_joined(span.blocks_needed, new.blocks_needed),
        blocks_free=_joined(span.blocks_free, new.blocks_free),
        buckets=tuple(dict.fromkeys([*span.buckets, *new.buckets]))[:_MAX_BUCKETS],
    )


def _point(number: int) -> Range:
    return (int(number), int(number))


def _joined(one: Range | None, other: Range | None) -> Any:
    if one is None or other is None:
        return one or other
    return (min(one[0], other[0]), max(one[1], other[1]))


def _buckets(notes: StepNotes, index: int) -> tuple[str, ...]:
    """Return the bucket that a sequence of the plan ran in, in words: usually one."""
    if index < 0:
        return ()
    return tuple(_words(bucket) for bucket, indices in notes.passes if np.any(indices == index))


def _words(bucket: Bucket) -> str:
    if isinstance(bucket, UnifiedBucket):
        return f"{bucket.query_len} tokens, {bucket.num_blocks} shared, {bucket.num_unique_blocks} unique blocks"
    return f"{bucket.phase.value} {bucket.batch_size}x{bucket.query_len}, {bucket.num_blocks} blocks"
