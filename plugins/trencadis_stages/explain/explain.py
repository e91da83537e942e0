"""From the step record to the story of one request. Pure; reads what was noted, decides nothing.

Some milliseconds for a thousand steps, on the engine's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from trencadis.engine.state import EngineState
from trencadis.errors import InvalidRequestError
from trencadis.records import Bucket, Explanation, Int32Array, Range, Span, UnifiedBucket
from trencadis_stages.explain.record import Decisions, RequestLifetime, StepNotes

__all__ = ["Verdict", "explain_request", "verdict_of"]

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


def _explanation(life: RequestLifetime, notes: tuple[StepNotes, ...], names: _Names, state: EngineState) -> Explanation:
    known = [one for one in notes if life.born <= one.number < life.died]
    where, num_output = "finished", life.num_output_tokens
    slot = state.slot_of.get(life.request_id)
    if not life.finish_reason and slot is not None:
        sequence = state.table.sequence(slot)
        where = state.aside[slot].reason if slot in state.aside else sequence.state.name.lower()
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
        self._lives: dict[int, list[RequestLifetime]] = defaultdict(list)
        for life in decisions.lives():
            self._lives[life.slot].append(life)

    def of(self, slot: int, number: int) -> str:
        """Return the request that had a slot when a step was recorded; empty: unknown."""
        lives = self._lives.get(slot, ())
        return next((life.request_id for life in lives if life.born <= number < life.died), "")


def _spans(life: RequestLifetime, notes: list[StepNotes], names: _Names) -> Iterator[Span]:
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


def _span(life: RequestLifetime, notes: StepNotes, verdict: Verdict, other: str) -> Span:
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


@attrs.frozen(kw_only=True)
class Verdict:
    """The outcome for one request in one step; see ``Span`` for what the words mean.

    Attributes:
        outcome: See ``Span``.
        reason: In words.
        other: Slot of the request for which, or after which; -1: none.
        index: Place in the plan, or -1.
        start: Computed tokens before.
        num_tokens: Tokens computed.
        rank: Place in the order, 1 is first; 0: not known.
        num_needed: Blocks it took, where they were short.
        num_free: Blocks that there were then.
    """

    outcome: str
    reason: str = ""
    other: int = -1
    index: int = -1
    start: int = 0
    num_tokens: int = 0
    rank: int = 0
    num_needed: int = 0
    num_free: int = 0


_ASIDE = {
    "compiling": "the sampler prepares what it asks for, such as a grammar",
    "loading": "its KV is being loaded",
}
"""Why a sequence stands aside, in full, by the reason that its stage gives."""


def verdict_of(life: RequestLifetime, notes: StepNotes) -> Verdict:
    """Return what a step did with a request that was in the engine when it was planned. Pure."""
    slot = life.slot
    index = _place(notes.slots, slot)
    if index >= 0:
        return _scheduled(life, notes, index)
    for preemption in notes.preemptions:
        if preemption.slot == slot:
            if preemption.for_slot >= 0:
                return Verdict(
                    outcome="preempted", reason="it gave way to a waiting request", other=preemption.for_slot
                )
            return Verdict(
                outcome="preempted",
                reason="running sequences needed blocks",
                num_needed=preemption.num_needed,
                num_free=preemption.num_free,
            )
    if slot in notes.aside:
        return Verdict(outcome=notes.aside[slot], reason=_ASIDE.get(notes.aside[slot], "it stands aside"))
    if _place(notes.running, slot) >= 0:
        return Verdict(outcome="held", reason=_why_held(slot, notes))
    if life.error and life.died == notes.number + 1:
        return Verdict(outcome="failed", reason=life.error)
    return _waiting(slot, notes)


def _scheduled(life: RequestLifetime, notes: StepNotes, index: int) -> Verdict:
    start, count = int(notes.starts[index]), int(notes.counts[index])
    is_admitted = life.slot in notes.admitted
    outcome, reason = "prefill" if is_admitted or start < life.num_prompt_tokens else "decode", ""
    if notes.error:
        outcome, reason = "failed", notes.error
    elif is_admitted:
        reason = f"admitted, {start} tokens were there already" if start else "admitted"
    elif notes.alone == life.slot:
        reason = "alone, after a step that failed"
    rank = _place(notes.order, life.slot) + 1 if notes.order is not None else 0
    return Verdict(outcome=outcome, reason=reason, index=index, start=start, num_tokens=count, rank=rank)


def _why_held(slot: int, notes: StepNotes) -> str:
    """Return why a sequence with its blocks was given no token."""
    if notes.alone >= 0:
        return "another one runs alone, after a step that failed"
    if notes.active is None or _place(notes.active, slot) < 0:
        return "all its tokens are computed, the last is on its way"
    budgets = "" if notes.split is None else f": decodes {notes.split.decode}, prefills {notes.split.prefill}"
    if _place(notes.decodes, slot) >= 0:
        return f"no tokens of the budget were left for it{budgets}"
    return f"no tokens for prefills were left, or the policy gave it none{budgets}"


def _waiting(slot: int, notes: StepNotes) -> Verdict:
    """Return why a waiting sequence was not admitted."""
    rank = _place(notes.order, slot) + 1 if notes.order is not None else 0
    if notes.alone >= 0:
        return Verdict(outcome="waited", reason="another one runs alone, after a step that failed", rank=rank)
    if notes.skipped and slot in notes.skipped:
        return Verdict(outcome="waited", reason=notes.skipped[slot], rank=rank)
    if slot in notes.held_back:
        reason = "a stage held it back in an earlier plan, and is asked again in a later one"
        return Verdict(outcome="waited", reason=reason, rank=rank)
    stop = notes.stop
    if stop is not None and stop.reason == "blocks":
        reason = "no free blocks" if stop.slot == slot else "behind one that finds no free blocks"
        other = -1 if stop.slot == slot else stop.slot
        needed, free = stop.num_needed, stop.num_free
        return Verdict(outcome="waited", reason=reason, other=other, rank=rank, num_needed=needed, num_free=free)
    return Verdict(outcome="waited", reason=_why_not_reached(notes), rank=rank)


def _why_not_reached(notes: StepNotes) -> str:
    """Return why admission did not come as far as a waiting sequence."""
    if notes.stop is not None:
        return {"rows": "engine.max_num_seqs sequences run already", "tokens": "the token budget was used up"}[
            notes.stop.reason
        ]
    if any(preemption.for_slot < 0 for preemption in notes.preemptions):
        return "no sequence is scheduled in a step that preempts for blocks"
    if notes.num_left <= 0:
        given = notes.split is None or notes.split.prefill > 0
        return "the token budget was used up" if given else "the policy gave prefills no tokens"
    return "no sequence was scheduled"


def _place(slots: Int32Array | None, slot: int) -> int:
    """Return where a slot is, or -1."""
    if slots is None:
        return -1
    found = np.flatnonzero(slots == slot)
    return int(found[0]) if len(found) else -1
