"""One step from its plan to its commit, and what happens to an engine between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.errors import InternalError
from trencadis.interfaces import PendingStep
from trencadis.records import Drafts, Int32Array, Pass, Plan, StepOutput

__all__ = [
    "NOT_SUBMITTED",
    "NO_PASSES",
    "Obstacle",
    "PassCounts",
    "Proposal",
    "SchedulingChanged",
    "SubmittedStep",
]


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


_EMPTY = np.empty(0, np.int32)


class _NotSubmitted(PendingStep):
    """The pending step of a plan that was not submitted yet."""

    def wait(self) -> StepOutput:
        """Raise: there is nothing to wait for."""
        raise InternalError("a step is awaited that was not submitted")


NOT_SUBMITTED = _NotSubmitted()


@attrs.frozen(eq=False)
class Proposal:
    """Tokens guessed to follow the known ones of some running sequences; a plan verifies as many as budgets and blocks allow.

    Attributes:
        slots: Slots of the sequences, int32 ``[n]``.
        tokens: Tokens of each, in the same order.
    """

    slots: Int32Array
    tokens: Drafts


@attrs.define(kw_only=True, eq=False)
class SubmittedStep:
    """One step from its plan to its commit, with the counts of its planning.

    Attributes:
        plan: Who runs how many tokens.
        pending: Returns the output, once it is there.
        passes: Forwards of its batch.
        start_s: Engine clock when its planning began.
        plan_s: Seconds to plan, build and submit it.
        wait_s: Engine clock when the engine began to wait for its output.
        output_s: Engine clock when its output was there.
        commit_s: Seconds to commit it.
        num_prompt_tokens_admitted: Prompt tokens of the sequences that its plan admitted.
        num_prompt_tokens_cached: Those of them that were cached.
        num_recomputed_tokens: Tokens that had been computed before a preemption.
        pass_counts: How its passes got their buckets.
        policy: Name of the scheduling policy that decided it.
        num_quarantined: Scheduling policies that a fallback replaced, total since the start.
        num_brought: Tokens that sequences were given while it was planned, which no step computes.
        num_kept: Where tokens were verified, how many of its output each sequence of the plan was given: none after an end.
        is_dropped: The output does not count: an older step failed, or the engine closes.
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
    num_kept: Int32Array = _EMPTY
    is_dropped: bool = False
    stats: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Obstacle:
    """Something that keeps a record of the steps from being replayed exactly.

    Attributes:
        words: The event, as the middle of a sentence.
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
