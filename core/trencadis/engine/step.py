"""One step from its plan to its commit, and what its plan decided, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from trencadis.errors import InternalError
from trencadis.interfaces import PendingStep, TokenSplit
from trencadis.records import Bucket, Int32Array, Pass, Plan, StepOutput

__all__ = [
    "NOT_SUBMITTED",
    "NO_PASSES",
    "Obstacle",
    "PassCounts",
    "Preemption",
    "SchedulingChanged",
    "StepNotes",
    "Stop",
    "SubmittedStep",
]

_EMPTY = np.empty(0, np.int32)
_MAX_RANKS = 4096
_MAX_SKIPPED = 4096


@attrs.define(kw_only=True)
class PassCounts:
    """How the passes of one plan found their buckets; see ``StepStats``.

    Attributes:
        compiles: A bucket is used for the first time and was not prepared: the device may compile it, which may take minutes.
    """

    num_hits: int = 0
    num_fallbacks: int = 0
    num_substituted: int = 0
    num_unprepared: int = 0
    compiles: bool = False


NO_PASSES = PassCounts()


class _NotSubmitted(PendingStep):
    """The pending step of a plan that was not submitted yet."""

    def wait(self) -> StepOutput:
        """Raise: there is nothing to wait for."""
        raise InternalError("a step is awaited that was not submitted")


NOT_SUBMITTED = _NotSubmitted()


@attrs.define(kw_only=True, eq=False)
class SubmittedStep:
    """One step from its plan to its commit, with the counts of its planning.

    Attributes:
        plan: Who runs how many tokens.
        pending: Its output, to be waited for.
        passes: Forwards of its batch.
        start_s: Engine clock when its planning began.
        plan_s: Seconds to plan, build and submit it.
        wait_s: Engine clock when the engine began to wait for its output.
        output_s: Engine clock when its output was there.
        commit_s: Seconds to commit it.
        num_prompt_tokens_admitted: Prompt tokens of the sequences that its plan admitted.
        num_prompt_tokens_cached: Those of them that were cached.
        num_recomputed_tokens: Its tokens that had been computed before a preemption.
        pass_counts: How its passes got their buckets.
        policy: Name of the scheduling policy that decided it.
        num_quarantined: Scheduling policies that a fallback replaced, total since the start.
        num_brought: Tokens that sequences were given while it was planned, which no step computes.
        stats: Further fields of ``StepStats``, and of ``EngineTotals`` by the same name, from stages; numbers.
    """

    plan: Plan
    pending: PendingStep = NOT_SUBMITTED
    passes: tuple[Pass, ...] = ()
    start_s: float = 0.0
    plan_s: float = 0.0
    wait_s: float = 0.0
    output_s: float = 0.0
    commit_s: float = 0.0
    num_prompt_tokens_admitted: int = 0
    num_prompt_tokens_cached: int = 0
    num_recomputed_tokens: int = 0
    pass_counts: PassCounts = NO_PASSES
    policy: str = ""
    num_quarantined: int = 0
    num_brought: int = 0
    stats: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Obstacle:
    """Something that keeps a record of the steps from being replayed exactly.

    Attributes:
        words: What happened, the middle of a sentence.
    """

    words: str


@attrs.frozen(kw_only=True)
class SchedulingChanged:
    """A change of scheduling, between two steps.

    Attributes:
        change: The table of the change, with its options as they are in force, without secrets.
        in_force: Scheduling in force now, as a change of the configuration.
        components: Code of the components that schedule now, by dotted path of the setting that names each.
    """

    change: Mapping[str, Any]
    in_force: Mapping[str, Any]
    components: Mapping[str, tuple[str, str, str, str]]


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
    """What one plan decided. Arrays must not be changed after they were noted.

    Attributes:
        number: Of the note, growing.
        step: Of the plan.
        now_s: Engine clock when it was made.
        num_waiting: Sequences that waited then.
        num_free_blocks: Blocks that could be had then.
        policy: Name of the policy.
        split: What the policy gave decodes and prefills, or None if it was not asked.
        num_left: Tokens left for admission; -1: none could have been admitted.
        running: Slots that ran after planning.
        active: Of those that ran, the ones with a token to compute; None: not looked at.
        decodes: Of the active ones, those that decode.
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
        is_idle: Nothing was planned, and there was nothing to plan.
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
    is_idle = False

    def skip(self, slot: int, reason: str) -> None:
        """Note why a waiting sequence was passed over."""
        if self.skipped is None:
            self.skipped = {}
        if len(self.skipped) < _MAX_SKIPPED:
            self.skipped[slot] = reason

    def rank(self, order: Int32Array) -> None:
        """Note the order of admission."""
        self.order = order if len(order) <= _MAX_RANKS else order[:_MAX_RANKS].copy()

    def preempt(self, slot: int, *, for_slot: int = -1, num_needed: int = 0, num_free: int = 0) -> None:
        """Note who lost its blocks."""
        self.preemptions += (Preemption(slot, for_slot, num_needed, num_free),)
