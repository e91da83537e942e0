"""Scheduling by quality of experience, after Andes, and the round robin that it was compared with.

Source: Liu et al., Andes, arXiv 2404.16283, first version (April 2024) and second (December 2024).
"""

from __future__ import annotations

import math

import numpy as np

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import BoolArray, FloatArray, Int32Array, Request

__all__ = ["Andes", "RoundRobin", "gain"]


def gain(
    now_s: FloatArray,
    *,
    start_s: FloatArray,
    free_s: FloatArray,
    ttft_s: FloatArray,
    tpot_s: FloatArray,
    token_s: float,
    horizon_s: float,
) -> FloatArray:
    """Return by how much the quality of answers at the horizon is higher if they get tokens until then, ``[num_answers]``. Pure.

    Quality is the area below the curve of tokens that were read, over time, by the area below the expected curve, both until the horizon.
    Tokens count by the part that was read, and how long the answer will be is not known: the expected curve goes on. What is read next is
    the minimum of what the reader can read and of what has come: ``min((t - max(free, start)) / tpot, (t - start) / token)``.

    Args:
        now_s: Since each request came, as all other times.
        start_s: When its next token begins to be computed.
        free_s: When its reader has read what came, or expects the first token.
        ttft_s: When the first token is expected.
        tpot_s: Time to read a token.
        token_s: From one token to the next.
        horizon_s: From now on.
    """
    end_s, pace, rate = now_s + horizon_s, 1 / tpot_s, 1 / token_s
    from_s = np.maximum(free_s, start_s)
    is_slow = rate < pace
    # Where tokens come more slowly than they are read, a reader with a stock has read it up at this time.
    meet_s = np.where(is_slow, (pace * from_s - rate * start_s) / np.where(is_slow, pace - rate, 1), np.inf)
    until_s = np.minimum(meet_s, end_s)
    read = pace * np.maximum(until_s - from_s, 0) ** 2 / 2
    read += np.where(
        is_slow, rate * (np.maximum(end_s - start_s, 0) ** 2 - np.maximum(until_s - start_s, 0) ** 2) / 2, 0
    )
    expected = pace * np.maximum(end_s - ttft_s, 0) ** 2 / 2
    return np.divide(read, expected, out=np.zeros_like(read), where=expected > 0)


class Andes(SchedulingPolicy):
    """Serves those whose quality of experience gains most for the KV cache that they take, and preempts those who have tokens in stock.

    In each plan with waiting sequences all, waiting and running, are ordered by the gain within a horizon by their known tokens, and the
    first are packed until the cache is full. A waiting one among them may take the place of running ones that are not, if what it gains
    is more than all others lose while the device recomputes what is preempted.

    Args:
        horizon_s: Δt: how far ahead qualities are estimated.
        refine: Whether that loss counts: the overhead-aware refiner of the second version.
        running_bonus: By how much more the gain of one that runs counts, as in the authors' code; otherwise equal ones take turns.
        max_preemptions: Most times that sequences are named to give way, for each request that came: the cap P of the first version.
            0: no limit.
        ttft_target_s: Of requests that state none.
        tpot_target_s: Of requests that state none.
        step_ms: Of every step.
        context_token_us: Of a step, for each KV entry of those that run.
        prompt_token_us: Of every prompt token, and of every other one that is computed again.

    Source: algorithm 1 and section 4 of the paper's second version; there also batches smaller than the cache allows are tried.
    """

    preempts = True

    def __init__(
        self,
        horizon_s: float = 50.0,
        refine: bool = True,
        running_bonus: float = 0.5,
        max_preemptions: float = 1.0,
        ttft_target_s: float = 1.0,
        tpot_target_s: float = 1 / 4.8,
        step_ms: float = 16.9,
        context_token_us: float = 0.135,
        prompt_token_us: float = 90.0,
    ) -> None:
        self._horizon_s, self._refine, self._cap = horizon_s, refine, max_preemptions
        self._running_bonus = running_bonus
        self._targets_s = ttft_target_s, tpot_target_s
        self._step_s, self._context_s, self._prompt_s = step_ms / 1e3, context_token_us / 1e6, prompt_token_us / 1e6
        self._num_came = self._num_preempted = 0
        self._num_tokens: FloatArray = np.zeros(256)  # by slot: that its reader got
        self._free_s: FloatArray = np.zeros(256)  # since the request came: when that is read
        self._priority: FloatArray = np.zeros(256)  # by slot, of the newest order
        self._gain: FloatArray = np.zeros(256)
        self._is_served: BoolArray = np.zeros(256, np.bool_)

    def on_added(self, *, slot: int, request: Request) -> None:
        """Begin with a reader who has nothing."""
        self._num_came += 1
        while slot >= len(self._num_tokens):
            for name in ("_num_tokens", "_free_s", "_priority", "_gain", "_is_served"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._num_tokens[slot] = 0.0
        self._free_s[slot] = self._targets_s[0] if math.isinf(request.ttft_target_s) else request.ttft_target_s

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Note which tokens have come since the last step."""
        running = view.running
        if running.size:
            self._note(view, running)
        return super().split(view, token_budget=token_budget)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by gain for each token of context, the largest first, and remember who should be served."""
        waiting = view.waiting
        slots = np.concatenate([waiting, view.running])
        self._note(view, view.running)
        gains = self._gains(view, slots)
        gains[len(waiting) :] *= 1 + self._running_bonus
        self._gain[slots] = gains
        self._priority[slots] = gains / view.num_tokens[slots]
        ranked = slots[np.lexsort((view.arrival_s[slots], -self._priority[slots]))]
        needed = np.cumsum(-(-(view.num_tokens[ranked] + 1) // view.block_size))
        num_rows = view.num_free_rows + len(view.running)
        self._is_served[ranked] = (needed <= view.num_total_blocks) & (np.arange(len(ranked)) < num_rows)
        return waiting[np.lexsort((view.arrival_s[waiting], -self._priority[waiting]))]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the candidate with the least priority of those that should not be served, if preempting it is worth it."""
        places = candidates[~self._is_served[candidates]]
        if not self._is_served[slot] or not places.size:
            return -1
        if self._cap and self._num_preempted >= self._cap * self._num_came:
            return -1
        victim = int(places[np.argmin(self._priority[places])])
        if self._refine and self._gain[slot] <= self._loss(view, victim):
            return -1
        self._num_preempted += 1
        return victim

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the candidate that gains least for each token of its context."""
        self._note(view, view.running)
        return int(candidates[np.argmin(self._gains(view, candidates) / view.num_tokens[candidates])])

    # ----------------------------------------------------------------------------------------------------------

    def _note(self, view: SchedulerView, slots: Int32Array) -> None:
        """Show readers the tokens that have come; one that is being computed counts."""
        num_output = np.where(
            np.isinf(view.first_token_s[slots]), 0, view.num_tokens[slots] - view.num_prompt_tokens[slots]
        )
        num_new = np.maximum(num_output - self._num_tokens[slots], 0)
        self._num_tokens[slots] += num_new
        from_s = np.maximum(view.now_s - view.arrival_s[slots], self._free_s[slots])
        _, tpot_s = self._targets(view, slots)
        self._free_s[slots] = np.where(num_new > 0, from_s + num_new * tpot_s, self._free_s[slots])

    def _targets(self, view: SchedulerView, slots: Int32Array) -> tuple[FloatArray, FloatArray]:
        ttft_s, tpot_s = self._targets_s
        own_ttft_s, own_tpot_s = view.ttft_target_s[slots], view.tpot_target_s[slots]
        return (
            np.where(np.isinf(own_ttft_s), ttft_s, own_ttft_s),
            np.where(np.isinf(own_tpot_s), tpot_s, own_tpot_s),
        )

    def _gains(self, view: SchedulerView, slots: Int32Array, *, later_s: float = 0.0) -> FloatArray:
        """Return what slots gain by being served from now, or from later, on."""
        running = view.running
        num_left = view.num_tokens[slots] - np.maximum(view.num_computed_tokens[slots], view.num_swapped_tokens[slots])
        token_s = self._step_s + self._context_s * float(view.num_computed_tokens[running].sum())
        now_s = view.now_s - view.arrival_s[slots]
        ttft_s, tpot_s = self._targets(view, slots)
        return gain(
            now_s,
            start_s=now_s + later_s + self._prompt_s * np.maximum(num_left - 1, 0),
            free_s=self._free_s[slots],
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            token_s=token_s,
            horizon_s=self._horizon_s,
        )

    def _loss(self, view: SchedulerView, victim: int) -> float:
        """Return what all that run lose while the tokens of a victim are computed again, or copied."""
        swaps = view.num_free_host_blocks >= view.num_blocks[victim]
        overhead_s = 0.0 if swaps else self._prompt_s * float(view.num_computed_tokens[victim])
        others = view.running[view.running != victim]
        lost = self._gains(view, others) - self._gains(view, others, later_s=overhead_s)
        return float(lost.sum())


class RoundRobin(SchedulingPolicy):
    """Each sequence runs for a quantum, and gives its place to the one that waits longest.

    Args:
        quantum_tokens: Output tokens, or steps of a decode.
    """

    preempts = True

    def __init__(self, quantum_tokens: int = 50) -> None:
        self._quantum = quantum_tokens
        self._since: FloatArray = np.zeros(256)  # by slot: tokens when it was last admitted
        self._ran_s: FloatArray = np.zeros(256)
        self._ran: BoolArray = np.zeros(256, np.bool_)  # it has run, in the last step as well

    def on_added(self, *, slot: int, request: Request) -> None:
        """It has not run."""
        while slot >= len(self._since):
            for name in ("_since", "_ran_s", "_ran"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._ran_s[slot], self._ran[slot] = -1.0, False

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Note who runs, and with how many tokens it began."""
        self._ran[view.waiting] = False
        new = view.running[~self._ran[view.running]]
        self._since[new] = view.num_tokens[new]
        self._ran[view.running], self._ran_s[view.running] = True, view.now_s
        return super().split(view, token_budget=token_budget)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by the time since which they wait."""
        waiting = view.waiting
        since_s = np.where(self._ran_s[waiting] < 0, view.arrival_s[waiting], self._ran_s[waiting])
        return waiting[np.lexsort((view.arrival_s[waiting], since_s))]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the candidate that has used its quantum up and had most tokens since."""
        used = np.where(self._ran[candidates], view.num_tokens[candidates] - self._since[candidates], 0)
        return int(candidates[np.argmax(used)]) if used.max() >= self._quantum else -1
