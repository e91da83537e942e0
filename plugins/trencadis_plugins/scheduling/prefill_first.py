"""Prompts and decodes in steps of their own, prompts first: how engines scheduled before chunked prefill."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView, TokenSplit, plain_state
from trencadis.records import Int32Array
from trencadis_plugins.scheduling.config import PrefillFirstConfig
from trencadis_plugins.scheduling.fcfs import MANY_STEPS, Fcfs

__all__ = ["PrefillFirst"]


@plain_state
class PrefillFirst(Fcfs):
    """A step computes prompts only, whole ones, while any can be admitted; else it decodes.

    New prompts answer soonest this way, and running texts stand still meanwhile. Where preemption is by swap, no new prompt is
    admitted while a sequence is swapped out: those come back first, beside the decodes. Where nothing runs and none of them can come
    back, new prompts are admitted all the same.

    Args:
        config: Delay, watermark, chunks.

    Source: the first scheduler of vLLM (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023), with its delay factor and watermark.
    """

    def __init__(self, config: PrefillFirstConfig | None = None) -> None:
        config = config if config is not None else PrefillFirstConfig()
        super().__init__(config)
        self._delay_factor, self._watermark_ratio = config.delay_factor, config.watermark_ratio
        self._chunked = config.chunked
        self._budget = 0
        self._is_swapped = False
        self._may_swap_in = True  # False: the last step was for swapped sequences alone, and nothing ran
        self._is_full = False  # a prompt of this step did not fit: nobody after it overtakes
        self._tried: tuple[int, int] | None = None  # what ran before a prompt step of which nothing may have come
        self._step_began_s = self._last_step_s = 0.0

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the whole budget for one of the two."""
        self._is_full = False
        if self._tried is not None:
            self._last_step_s = view.now_s - self._step_began_s
        running = view.running
        state = (len(running), int(view.num_computed_tokens[running].sum()))
        self._budget = min(token_budget, super().split(view, token_budget=token_budget).prefill)
        self._is_swapped = view.num_swapped > 0 and (self._may_swap_in or len(running) > 0)
        self._may_swap_in = len(running) > 0 or not self._is_swapped
        if self._is_swapped:
            return self._swap_in(view, token_budget)
        prefills = self._has_unfinished(view) or self._can_admit(view)
        if prefills and state != self._tried:
            self._tried, self._step_began_s = state, view.now_s
            return TokenSplit(decode=0, prefill=self._budget)
        self._tried = None
        # With nothing to decode a prompt may as well run.
        return TokenSplit(decode=token_budget, prefill=0 if len(running) else self._budget)

    def steady_steps(self, view: SchedulerView) -> int:
        """Return no limit: without a prompt that runs or could be admitted every step decodes."""
        return MANY_STEPS

    def order(self, view: SchedulerView) -> Int32Array:
        """Return swapped sequences first, as they wait."""
        waiting = super().order(view)
        if not view.num_swapped:
            return waiting
        is_swapped = view.num_swapped_tokens[waiting] > 0
        return np.concatenate([waiting[is_swapped], waiting[~is_swapped]])

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return a whole prompt or nothing; one longer than the budget gets a step's whole budget."""
        if self._is_swapped:
            is_new = view.num_blocks[slot] == 0 and view.num_swapped_tokens[slot] == 0
            return 0 if is_new else min(num_remaining, token_budget)
        fits = self._chunked or num_remaining <= token_budget or token_budget >= self._budget
        if fits and not self._is_full:
            return super().chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget)
        self._is_full = True
        return 0

    def _swap_in(self, view: SchedulerView, token_budget: int) -> TokenSplit:
        """Return a step for decodes, and for what is left to compute of running and swapped prompts and nothing else."""
        self._tried = None
        waiting, running = view.waiting, view.running
        swapped = waiting[view.num_swapped_tokens[waiting] > 0]
        left = int((view.num_tokens[swapped] - view.num_swapped_tokens[swapped]).sum())
        remaining = view.num_tokens[running] - view.num_computed_tokens[running]
        left += int(remaining[remaining > 1].sum())
        return TokenSplit(decode=token_budget, prefill=min(left, self._budget))

    @staticmethod
    def _has_unfinished(view: SchedulerView) -> bool:
        running = view.running
        return bool((view.num_tokens[running] - view.num_computed_tokens[running] > 1).any())

    def _can_admit(self, view: SchedulerView) -> bool:
        """True if the delay is over and a row and blocks are there for the first that waits."""
        waiting, running = view.waiting, view.running
        if not len(waiting) or not view.num_free_rows:
            return False
        if len(running) and self._delay_factor:
            waited_s = view.now_s - float(view.waiting_since_s[waiting].min())
            if waited_s <= self._delay_factor * self._last_step_s:
                return False
        reserve = int(view.num_total_blocks * self._watermark_ratio) if len(running) else 0
        needed = -(-int(view.num_tokens[waiting[0]]) // view.block_size)
        return needed + reserve <= view.num_free_blocks
