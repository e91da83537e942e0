"""What a step cost and did: cumulative totals, and the statistics that observers see."""

from __future__ import annotations

from itertools import zip_longest

import attrs
import numpy as np

from trencadis.engine.batching.passes import PassCounts
from trencadis.engine.cache.swapping import NO_SWAPS, SwapCounts
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.scheduling.shadow import NO_SHADOW, ShadowStep
from trencadis.engine.state import EngineState
from trencadis.errors import InternalError
from trencadis.interfaces import PendingStep
from trencadis.records import (
    Drafts,
    EngineGauges,
    Int32Array,
    Int64Array,
    Pass,
    Plan,
    StepOutput,
    StepStats,
    TokenDeltas,
)

__all__ = ["Accounting", "DraftCounts", "EngineTotals", "NO_DRAFTS", "SubmittedStep", "added", "count_drafts"]


class _NotSubmitted(PendingStep):
    """The pending step of a plan that was not submitted yet."""

    def wait(self) -> StepOutput:
        """Raise: there is nothing to wait for."""
        raise InternalError("a step is awaited that was not submitted")


NOT_SUBMITTED, NO_PASSES = _NotSubmitted(), PassCounts()


@attrs.define(kw_only=True, eq=False)
class SubmittedStep:
    """One step from its plan to its commit, with the counts of its planning; stages fill in theirs."""

    plan: Plan
    pending: PendingStep = NOT_SUBMITTED
    passes: tuple[Pass, ...] = ()
    start_s: float = 0.0
    plan_s: float = 0.0
    num_prompt_tokens_admitted: int = 0
    num_prompt_tokens_cached: int = 0
    num_recomputed_tokens: int = 0
    pass_counts: PassCounts = NO_PASSES
    policy: str = ""
    num_quarantined: int = 0
    shadow: ShadowStep = NO_SHADOW
    swap_counts: SwapCounts = NO_SWAPS
    num_block_swaps: int = 0
    draft_s: float = 0.0
    num_drafters_quarantined: int = 0


@attrs.define(kw_only=True)
class EngineTotals:
    """Counts since the engine was built; durations in seconds. Fields are those of ``StepStats``, summed up.

    ``num_sequence_steps`` counts, step by step, the sequences that got tokens: ``num_emitted_tokens`` by it is the mean that a
    sequence gets in a step, 1 without speculation.
    """

    num_steps: int = 0
    num_sequence_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    num_emitted_tokens: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    num_prompt_tokens_cached: int = 0
    num_prompt_tokens_admitted: int = 0
    num_recomputed_tokens: int = 0
    num_drafted_sequences: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafted_by_position: tuple[int, ...] = ()
    num_accepted_by_position: tuple[int, ...] = ()
    num_drafters_quarantined: int = 0
    num_failed_steps: int = 0
    num_block_swaps: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_swap_fallbacks: int = 0
    num_compilations: int = 0
    num_bucket_hits: int = 0
    num_fallbacks: int = 0
    num_substituted: int = 0
    num_unprepared: int = 0
    num_observer_failures: int = 0
    plan_s: float = 0.0
    draft_s: float = 0.0
    device_s: float = 0.0
    commit_s: float = 0.0


class Accounting:
    """Counts committed steps of one engine and shows them to its observers.

    Args:
        state: The engine's state, read only.
        observers: Who watches.
    """

    def __init__(self, state: EngineState, observers: Observers) -> None:
        self.totals = EngineTotals()
        self._state = state
        self._first_tokens = state.transfers.first_tokens
        self._observers = observers

    def committed(
        self, step: SubmittedStep, output: StepOutput, deltas: TokenDeltas, *, num_accepted: Int32Array, commit_s: float
    ) -> None:
        """Count one step; ``num_accepted`` are the emitted drafts of each sequence of its plan."""
        totals, plan, swaps, passes = self.totals, step.plan, step.swap_counts, step.pass_counts
        drafts = NO_DRAFTS if plan.drafts is None else count_drafts(plan.drafts, num_accepted)
        num_first = self._first_tokens.take_num_new() if self._first_tokens.num_new else 0
        totals.num_steps += 1
        totals.num_sequence_steps += len(deltas.slots) + num_first
        totals.num_scheduled_tokens += plan.num_tokens
        totals.num_padded_tokens += output.num_padded_tokens
        totals.num_compilations += output.num_compilations
        if swaps is not NO_SWAPS:
            totals.num_blocks_swapped_out += swaps.num_blocks_out
            totals.num_blocks_swapped_in += swaps.num_blocks_in
            totals.num_swap_fallbacks += swaps.num_fallbacks
        totals.num_bucket_hits += passes.num_hits
        totals.num_fallbacks += passes.num_fallbacks
        totals.num_substituted += passes.num_substituted
        totals.num_unprepared += passes.num_unprepared
        totals.num_emitted_tokens += len(deltas.token_ids) + num_first
        totals.num_preempted += len(plan.preempted)
        totals.num_prompt_tokens_admitted += step.num_prompt_tokens_admitted
        totals.num_prompt_tokens_cached += step.num_prompt_tokens_cached
        totals.num_recomputed_tokens += step.num_recomputed_tokens
        totals.num_drafters_quarantined = step.num_drafters_quarantined
        totals.draft_s += step.draft_s
        if drafts.num_sequences:
            self._add_drafts(drafts)
        totals.plan_s += step.plan_s
        totals.commit_s += commit_s
        totals.device_s += output.device_s
        if self._observers.watched:
            self._observers.on_step(self._stats(step, output, deltas, num_first, drafts, commit_s))
            totals.num_observer_failures = self._observers.num_failures

    def _add_drafts(self, drafts: DraftCounts) -> None:
        totals = self.totals
        totals.num_drafted_sequences += drafts.num_sequences
        totals.num_draft_tokens += drafts.num_drafted
        totals.num_accepted_tokens += drafts.num_accepted
        totals.num_drafted_by_position = added(totals.num_drafted_by_position, drafts.num_drafted_by_position)
        totals.num_accepted_by_position = added(totals.num_accepted_by_position, drafts.num_accepted_by_position)

    def gauges(self) -> EngineGauges:
        """Return what the engine holds now."""
        state = self._state
        return EngineGauges(
            num_running=len(state.running),
            num_waiting=state.num_queued + state.transfers.num_waiting_for_kv,
            num_compiling=len(state.compiling),
            num_swapped=state.swapping.num_swapped,
            num_free_blocks=state.blocks.num_free,
            num_cached_blocks=state.blocks.num_cached,
            num_used_blocks=state.blocks.num_used,
        )

    def _stats(
        self,
        step: SubmittedStep,
        output: StepOutput,
        deltas: TokenDeltas,
        num_first: int,
        drafts: DraftCounts,
        commit_s: float,
    ) -> StepStats:
        state, plan = self._state, step.plan
        return StepStats(
            step=plan.step,
            now_s=state.clock.now_s(),
            num_running=len(state.running),
            num_waiting=state.num_queued + state.transfers.num_waiting_for_kv,
            num_compiling=len(state.compiling),
            num_sequences=plan.num_sequences,
            num_scheduled_tokens=plan.num_tokens,
            num_padded_tokens=output.num_padded_tokens,
            num_emitted_tokens=len(deltas.token_ids) + num_first,
            num_admitted=len(plan.admitted),
            num_preempted=len(plan.preempted),
            num_finished=len(deltas.finished),
            num_prompt_tokens_cached=step.num_prompt_tokens_cached,
            num_prompt_tokens_admitted=step.num_prompt_tokens_admitted,
            num_recomputed_tokens=step.num_recomputed_tokens,
            num_drafted_sequences=drafts.num_sequences,
            num_draft_tokens=drafts.num_drafted,
            num_accepted_tokens=drafts.num_accepted,
            num_drafted_by_position=drafts.num_drafted_by_position,
            num_accepted_by_position=drafts.num_accepted_by_position,
            num_drafters_quarantined=step.num_drafters_quarantined,
            num_free_blocks=state.blocks.num_free,
            num_cached_blocks=state.blocks.num_cached,
            num_used_blocks=state.blocks.num_used,
            start_s=step.start_s,
            plan_s=step.plan_s,
            draft_s=step.draft_s,
            device_s=output.device_s,
            commit_s=commit_s,
            passes=step.passes,
            num_compilations=output.num_compilations,
            policy=step.policy,
            num_quarantined=step.num_quarantined,
            num_shadow_steps=int(step.shadow.was_asked),
            num_shadow_differing=int(step.shadow.differs),
            shadow_displacement=step.shadow.displacement,
            shadow_s=step.shadow.spent_s,
            num_bucket_hits=step.pass_counts.num_hits,
            num_fallbacks=step.pass_counts.num_fallbacks,
            num_substituted=step.pass_counts.num_substituted,
            num_unprepared=step.pass_counts.num_unprepared,
            num_block_swaps=step.num_block_swaps,
            num_swapped=state.swapping.num_swapped,
            num_blocks_swapped_out=step.swap_counts.num_blocks_out,
            num_blocks_swapped_in=step.swap_counts.num_blocks_in,
            num_swap_fallbacks=step.swap_counts.num_fallbacks,
        )


@attrs.frozen(kw_only=True)
class DraftCounts:
    """Drafts of one step. The position of a draft is the number of drafts before it on its way to the known tokens.

    Attributes:
        num_sequences: Sequences with drafts.
        num_drafted_by_position: Drafts verified at each position, from 0.
        num_accepted_by_position: Of these, those that were emitted; as long as the other.
    """

    num_sequences: int = 0
    num_drafted_by_position: tuple[int, ...] = ()
    num_accepted_by_position: tuple[int, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Drafts at all positions."""
        return sum(self.num_drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Emitted drafts at all positions."""
        return sum(self.num_accepted_by_position)


NO_DRAFTS = DraftCounts()
"""Of a step without drafts."""


def count_drafts(drafts: Drafts | None, num_accepted: Int32Array) -> DraftCounts:
    """Return the counts of a step's drafts. Pure.

    Args:
        drafts: Of the plan.
        num_accepted: Emitted drafts of each sequence of the plan: the first ones of a chain, or a way down a tree.
    """
    if drafts is None:
        return NO_DRAFTS
    drafted = np.bincount(_positions(drafts))
    accepted = (num_accepted[:, None] > np.arange(len(drafted))).sum(0)
    return DraftCounts(
        num_sequences=int((drafts.num_drafts > 0).sum()),
        num_drafted_by_position=tuple(drafted.tolist()),
        num_accepted_by_position=tuple(accepted.tolist()),
    )


def added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sum of two counts by position; either may be longer. Pure."""
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def _positions(drafts: Drafts) -> Int64Array:
    firsts = np.repeat(np.cumsum(drafts.num_drafts) - drafts.num_drafts, drafts.num_drafts)
    if drafts.parents is None:
        return np.arange(len(firsts)) - firsts
    parents = np.where(drafts.parents >= 0, drafts.parents + firsts, -1)
    positions, ancestors = np.zeros(len(firsts), np.int64), parents
    while (ancestors >= 0).any():
        positions += ancestors >= 0
        ancestors = np.where(ancestors >= 0, parents[ancestors], -1)
    return positions
