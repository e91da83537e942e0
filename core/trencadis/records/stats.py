"""What observers see."""

from __future__ import annotations

import attrs

from trencadis.records.batch import Pass

__all__ = ["EngineGauges", "EngineTotals", "StepStats"]


@attrs.frozen(kw_only=True)
class StepStats:
    """One committed step. Counts are of this step unless they say total; durations are in seconds.

    Attributes:
        step: Number of the step.
        now_s: Engine clock at commit.
        num_running: Sequences that hold blocks and a row, after the step.
        num_waiting: Sequences that wait, preempted ones included, after the step.
        num_sequences: Sequences in the step.
        num_scheduled_tokens: Tokens computed, padding left out.
        num_padded_tokens: Token positions computed, padding included.
        num_emitted_tokens: Output tokens committed.
        num_preempted: Sequences that lost their blocks in this step's plan.
        num_finished: Sequences that ended at this commit.
        num_prompt_tokens_cached: Prompt tokens that admissions of this step took from the prefix cache.
        num_prompt_tokens_admitted: Prompt tokens of the sequences admitted in this step.
        num_recomputed_tokens: Tokens of this step that had been computed before a preemption.
        num_draft_tokens: Drafts verified.
        num_accepted_tokens: Drafts emitted: accepted ones, without those after the end of their sequence.
        num_free_blocks: Blocks with nothing in them, after the step.
        num_cached_blocks: Unreferenced blocks kept for reuse, after the step.
        num_used_blocks: Blocks held by sequences or transfers, after the step.
        start_s: Engine clock when its planning began; before the commit of the step before it where steps overlap.
        plan_s: Time to make the plan and the batch, drafts included, and to submit it.
        device_s: Time on the device, as the backend reports it.
        commit_s: Time to commit.
        num_admitted: Sequences that entered the device with this step.
        passes: Forwards of its batch, to be read only; ``step_shape`` sums up their sizes.
        num_compilations: Programs compiled for the step, while its requests waited.
        num_bucket_hits: Passes of the step in a bucket of the strategy's table.
        num_fallbacks: Passes whose shape no bucket of the table covers.
        num_substituted: Passes in a larger bucket than their own, which was not prepared yet.
        num_unprepared: Passes in a bucket that was not prepared; each bucket counts once.
        num_block_swaps: Pairs of KV blocks that changed places before the step.
        num_compiling: Waiting sequences whose sampler has work to do before they can run, after the step.
        num_swapped: Waiting sequences whose blocks are in host memory, after the step.
        num_blocks_swapped_out: KV blocks copied to host memory before the step.
        num_blocks_swapped_in: KV blocks copied back before the step.
        num_swap_fallbacks: Sequences preempted for the step that host memory had no room for: they are recomputed.
        policy: Component that decided the plan.
        num_quarantined: Scheduling policies that a fallback replaced, total since the start.
        num_drafted_sequences: Sequences with drafts.
        num_drafted_by_position: Drafts verified at each position: how many drafts lie before one, on its way in a tree; from 0.
        num_accepted_by_position: Number of these that were emitted; as long as the other.
        draft_s: Time to choose the number of drafts and to make them; part of ``plan_s``.
        num_drafters_quarantined: Speculators and draft lengths that failed, total since the start.
        num_shadow_steps: 1 if a shadow policy was asked what it would do.
        num_shadow_differing: 1 if it would have chosen otherwise.
        shadow_displacement: Places by which it would have ordered the waiting sequences otherwise, their mean.
        shadow_s: Time that it took; part of ``plan_s``.
    """

    step: int
    now_s: float
    num_running: int
    num_waiting: int
    num_sequences: int
    num_scheduled_tokens: int
    num_padded_tokens: int
    num_emitted_tokens: int
    num_preempted: int
    num_finished: int
    num_prompt_tokens_cached: int
    num_prompt_tokens_admitted: int
    num_recomputed_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    plan_s: float
    device_s: float
    commit_s: float
    start_s: float = 0.0
    num_admitted: int = 0
    passes: tuple[Pass, ...] = attrs.field(default=(), eq=False, repr=False)
    num_compilations: int = 0
    policy: str = ""
    num_quarantined: int = 0
    num_drafted_sequences: int = 0
    num_drafted_by_position: tuple[int, ...] = ()
    num_accepted_by_position: tuple[int, ...] = ()
    draft_s: float = 0.0
    num_drafters_quarantined: int = 0
    num_shadow_steps: int = 0
    num_shadow_differing: int = 0
    shadow_displacement: float = 0.0
    shadow_s: float = 0.0
    num_bucket_hits: int = 0
    num_fallbacks: int = 0
    num_substituted: int = 0
    num_unprepared: int = 0
    num_block_swaps: int = 0
    num_swapped: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_swap_fallbacks: int = 0
    num_compiling: int = 0


@attrs.frozen(kw_only=True)
class EngineGauges:
    """What an engine holds at the moment, whether or not a step has run since it changed.

    Attributes:
        num_running: Sequences that hold blocks and a row.
        num_waiting: Sequences that wait, preempted ones included.
        num_compiling: Number of these whose sampler has work to do before they can run.
        num_swapped: Waiting sequences whose blocks are in host memory.
        num_free_blocks: Blocks with nothing in them.
        num_cached_blocks: Unreferenced blocks kept for reuse.
        num_used_blocks: Blocks held by sequences or transfers.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_compiling: int = 0
    num_swapped: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_used_blocks: int = 0


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
    num_drafters_quarantined: int = attrs.field(default=0, metadata={"is_latest": True})
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
