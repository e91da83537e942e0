"""What a step cost and did: cumulative totals, and the statistics that observers see."""

from __future__ import annotations

import attrs

from trencadis.engine.observers import Observers
from trencadis.engine.passes import PassCounts
from trencadis.engine.shadow import ShadowStep
from trencadis.engine.state import EngineState
from trencadis.engine.swapping import SwapCounts
from trencadis.interfaces import PendingStep
from trencadis.records import Plan, StepOutput, StepStats, TokenDeltas

__all__ = ["Accounting", "EngineTotals", "SubmittedStep"]


@attrs.frozen(kw_only=True)
class SubmittedStep:
    """A step in flight, with what its planning counted."""

    plan: Plan
    pending: PendingStep
    plan_s: float
    num_prompt_tokens_admitted: int
    num_prompt_tokens_cached: int
    num_recomputed_tokens: int
    pass_counts: PassCounts = attrs.field(factory=PassCounts)
    policy: str = ""
    num_quarantined: int = 0
    shadow: ShadowStep = attrs.field(factory=ShadowStep)
    swap_counts: SwapCounts = attrs.field(factory=SwapCounts)
    num_block_swaps: int = 0


@attrs.define(kw_only=True)
class EngineTotals:
    """Counts since the engine was built; durations in seconds. Fields are those of ``StepStats``, summed up."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    num_emitted_tokens: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    num_prompt_tokens_cached: int = 0
    num_prompt_tokens_admitted: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
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
        self._observers = observers

    def committed(
        self, step: SubmittedStep, output: StepOutput, deltas: TokenDeltas, *, num_accepted: int, commit_s: float
    ) -> None:
        """Count one step."""
        totals, plan = self.totals, step.plan
        num_tokens = plan.num_tokens
        num_drafts = 0 if plan.drafts is None else int(plan.drafts.num_drafts.sum())
        totals.num_steps += 1
        totals.num_scheduled_tokens += num_tokens
        totals.num_padded_tokens += output.num_padded_tokens
        totals.num_compilations += output.num_compilations
        totals.num_blocks_swapped_out += step.swap_counts.num_blocks_out
        totals.num_blocks_swapped_in += step.swap_counts.num_blocks_in
        totals.num_swap_fallbacks += step.swap_counts.num_fallbacks
        totals.num_bucket_hits += step.pass_counts.num_hits
        totals.num_fallbacks += step.pass_counts.num_fallbacks
        totals.num_substituted += step.pass_counts.num_substituted
        totals.num_unprepared += step.pass_counts.num_unprepared
        totals.num_emitted_tokens += len(deltas.token_ids)
        totals.num_preempted += len(plan.preempted)
        totals.num_prompt_tokens_admitted += step.num_prompt_tokens_admitted
        totals.num_prompt_tokens_cached += step.num_prompt_tokens_cached
        totals.num_recomputed_tokens += step.num_recomputed_tokens
        totals.num_draft_tokens += num_drafts
        totals.num_accepted_tokens += num_accepted
        totals.plan_s += step.plan_s
        totals.commit_s += commit_s
        totals.device_s += output.device_s
        if self._observers:
            self._observers.on_step(self._stats(step, output, deltas, num_tokens, num_drafts, num_accepted, commit_s))
            totals.num_observer_failures = self._observers.num_failures

    def _stats(
        self,
        step: SubmittedStep,
        output: StepOutput,
        deltas: TokenDeltas,
        num_tokens: int,
        num_drafts: int,
        num_accepted: int,
        commit_s: float,
    ) -> StepStats:
        state, plan = self._state, step.plan
        return StepStats(
            step=plan.step,
            now_s=state.clock.now_s(),
            num_running=len(state.running),
            num_waiting=len(state.waiting) + state.transfers.num_parked,
            num_sequences=plan.num_sequences,
            num_scheduled_tokens=num_tokens,
            num_padded_tokens=output.num_padded_tokens,
            num_emitted_tokens=len(deltas.token_ids),
            num_preempted=len(plan.preempted),
            num_finished=len(deltas.finished),
            num_prompt_tokens_cached=step.num_prompt_tokens_cached,
            num_prompt_tokens_admitted=step.num_prompt_tokens_admitted,
            num_recomputed_tokens=step.num_recomputed_tokens,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=num_accepted,
            num_free_blocks=state.blocks.num_free,
            num_cached_blocks=state.blocks.num_cached,
            num_used_blocks=state.blocks.num_used,
            plan_s=step.plan_s,
            device_s=output.device_s,
            commit_s=commit_s,
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
