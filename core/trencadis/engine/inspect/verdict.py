"""What one step did with one request, and why, from the step's notes. Pure."""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.engine.inspect.decisions import Life, StepNotes
from trencadis.records import Int32Array

__all__ = ["Verdict", "verdict_of"]


@attrs.frozen(kw_only=True)
class Verdict:
    """The outcome for one request in one step; see ``Span`` for what the words mean.

    Attributes:
        outcome: As of ``Span``.
        reason: In words.
        other: Slot of the request for which, or behind which; -1: none.
        index: Its place in the plan, or -1.
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


def verdict_of(life: Life, notes: StepNotes) -> Verdict:
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
    if slot in notes.compiling:
        return Verdict(outcome="compiling", reason="the sampler prepares what it asks for, such as a grammar")
    if slot in notes.parked:
        return Verdict(outcome="loading", reason="its KV is being loaded")
    if _place(notes.running, slot) >= 0:
        return Verdict(outcome="held", reason=_why_held(slot, notes))
    if life.error and life.died == notes.number + 1:
        return Verdict(outcome="failed", reason=life.error)
    return _waiting(slot, notes)


def _scheduled(life: Life, notes: StepNotes, index: int) -> Verdict:
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
    if _place(notes.without_adapter, slot) >= 0:
        return Verdict(outcome="waited", reason="its adapter has no place among engine.max_loras", rank=rank)
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
        return "nobody is admitted in a step that preempts for blocks"
    if notes.num_left <= 0:
        given = notes.split is None or notes.split.prefill > 0
        return "the token budget was used up" if given else "the policy gave prefills no tokens"
    return "nobody was admitted"


def _place(slots: Int32Array | None, slot: int) -> int:
    """Return where a slot is, or -1."""
    if slots is None:
        return -1
    found = np.flatnonzero(slots == slot)
    return int(found[0]) if len(found) else -1
