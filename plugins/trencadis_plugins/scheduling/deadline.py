"""Earliest deadline first."""

from __future__ import annotations

import math

import numpy as np

from trencadis.interfaces import SchedulerView, TokenSplit, plain_state
from trencadis.records import FloatArray, Int32Array, Request
from trencadis_plugins.scheduling.config import DeadlineConfig
from trencadis_plugins.scheduling.fcfs import MANY_STEPS, Fcfs
from trencadis_plugins.scheduling.victims import largest

__all__ = ["Deadline"]


@plain_state
class Deadline(Fcfs):
    """Least slack first: the time until the next token is due, less the time it takes to compute it.

    The first token is due ``ttft_target`` after the arrival, token i ``i × tpot_target`` after the first. Those that are late
    whatever is done go after those that are not, by arrival: under overload, running after lost deadlines loses the others too.
    Prompts take of a step what the decode with the least slack leaves; the one with the most slack loses its blocks. Keeps no state.

    Args:
        config: Targets of requests that state none, and whether hopeless ones are refused.

    Source: least slack time first (Liu, Real-Time Systems, chapter 4); the token deadlines are those of Liu et al., "Andes", 2024.
    """

    def __init__(self, config: DeadlineConfig | None = None) -> None:
        config = config if config is not None else DeadlineConfig()
        super().__init__(config)
        self._ttft_s, self._tpot_s = config.ttft_target_ms / 1e3, config.tpot_target_ms / 1e3
        self._shed = config.shed

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Refuse, if asked to, what would be late even if nothing but the prompts that wait were computed before it."""
        num_tokens = num_waiting_tokens + len(request.prompt_token_ids)
        expected_s = self.chunks.step_time.step_s(num_tokens)
        target_s = self._ttft_s if math.isinf(request.ttft_target_s) else request.ttft_target_s
        if not self._shed or expected_s <= target_s:
            return ""
        return (
            f"its first token would take {expected_s:.2f} s with {num_waiting} before it, its target is {target_s:g} s"
        )

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by slack, the least first, then those that are late, by arrival."""
        waiting = view.waiting
        needed_s = self.chunks.step_time.step_s(view.num_tokens[waiting].astype(np.float64))
        slack_s = self._due_s(view, waiting) - view.now_s - needed_s
        late = slack_s < 0
        return waiting[np.lexsort((np.where(late, view.arrival_s[waiting], slack_s), late))]

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the whole budget for decodes; for prefills what the tightest pace of those that decode allows."""
        paces_s = _or(view.tpot_target_s[view.running], self._tpot_s)
        target_s = float(paces_s.min()) if len(paces_s) else 0.0
        return TokenSplit(token_budget, self.chunks.prefill_budget(view, token_budget=token_budget, target_s=target_s))

    def steady_steps(self, view: SchedulerView) -> int:
        """Return no limit: decodes have the whole budget, and deadlines order only who waits."""
        return MANY_STEPS

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the candidate whose next token is due last."""
        return largest(self._due_s(view, candidates), candidates)

    def _due_s(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return when the next token of each slot is due, engine clock, seconds."""
        first_s = view.first_token_s[slots]
        before_first_s = view.arrival_s[slots] + _or(view.ttft_target_s[slots], self._ttft_s)
        num_output = view.num_tokens[slots] - view.num_prompt_tokens[slots]
        after_s = first_s + num_output * _or(view.tpot_target_s[slots], self._tpot_s)
        return np.where(np.isinf(first_s), before_first_s, after_s)


def _or(targets_s: FloatArray, default_s: float) -> FloatArray:
    """Return targets, and the default for requests that state none."""
    return np.where(np.isinf(targets_s), default_s, targets_s)
