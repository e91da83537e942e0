"""Cumulative counters of an engine, and the step statistics that observers see."""

from __future__ import annotations

import attrs

__all__ = ["EngineTotals"]


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
    num_observer_failures: int = 0
    plan_s: float = 0.0
    device_s: float = 0.0
    commit_s: float = 0.0
