"""SLOs-Serve as a scheduling policy: admits what meets its objectives, and gives each step the tokens that they leave.

    all prefills by deadline ▶ planner: as many as meet TTFT and TPOT ▶ standard, earliest deadline first
                                                └ the others ▶ best effort: what standard requests leave of a step

Name it by import path, ``scheduling.name = "examples.gallery.slos_serve.policy:SlosServe"``.

Source: Chen et al., "SLOs-Serve: Optimized Serving of Multi-SLO LLMs", arXiv 2504.08784, 2025.
"""

from __future__ import annotations

import math

import numpy as np
from examples.gallery.slos_serve.planner import Candidate, Room, admitted

from trencadis.interfaces import SchedulerView, SchedulingPolicy, SupportsSteadySteps, TokenSplit, plain_state
from trencadis.records import BoolArray, FloatArray, Int32Array, Int64Array, StepTime

__all__ = ["SlosServe"]

_FAR_S = 1e3
"""A first token without a target is due then, if the others have one."""
_LITTLE_S = 1e-6
"""Time that rounding may take."""
_WATERMARK = 0.01
"""Share of the blocks that the engine keeps free."""
_CATCH_UP = 0.5
"""A sequence that is behind its pace, as after a preemption, makes steps so many times as long as its TPOT at the least."""


@plain_state
class SlosServe(SchedulingPolicy, SupportsSteadySteps):
    """Plans again in every step: nothing is promised to a request but that it is in the largest set that meets its objectives now.

    A request is best effort if it has no targets, if its first token is late whatever is done, or if the plan leaves it out; the others
    are standard. A step takes as long as the tightest TPOT of standard requests, more where all that decode are ahead of their pace,
    less where one is behind. Its prompt tokens go to standard requests by deadline, then to the others, who lose their rows and blocks to
    standard ones.

    Meant for engines that plan a step when the one before has ended (``engine.async_scheduling = false``); else all is a step late.

    Args:
        step_ms: Model of step times: of an empty step.
        token_us: Of each token.
        context_token_us: Of each KV entry that is read.
        output_tokens: Answers are expected to be so long as long as none has ended; then as long as those that have, on average.
        max_candidates: So many prefills are planned for, those with the earliest deadlines.
        best_effort_share: Prefills that are best effort make a step no longer than this share of its pace, as who comes meanwhile waits for
            its end.
        max_step_ms: A step without decodes takes so long at most.
        lookahead_tokens: Those that decode are taken to go on for so many tokens at least, in which they can make up for a pause.
    """

    preempts = True

    def __init__(
        self,
        step_ms: float = 16.9,
        token_us: float = 90.0,
        context_token_us: float = 0.135,
        output_tokens: int = 200,
        max_candidates: int = 32,
        best_effort_share: float = 0.5,
        max_step_ms: float = 100.0,
        lookahead_tokens: int = 10,
    ) -> None:
        self._step_time = StepTime(base_s=step_ms / 1e3, token_s=token_us / 1e6, context_token_s=context_token_us / 1e6)
        self._max_candidates = max_candidates
        self._best_effort_share = best_effort_share
        self._max_step_s = max_step_ms / 1e3
        self._lookahead_tokens = lookahead_tokens
        self._pauses = False
        self._paused: tuple[int, int] | None = (
            None  # what ran before a step without decodes, of which nothing may have come
        )
        self._slack_s = 0.0
        self._num_ended, self._num_output_tokens = 1, output_tokens
        self._token_budget = 1 << 30
        self._is_planned = False
        self._standard: list[int] = []  # slots of prefills that the plan admits, by deadline
        self._others: list[int] = []  # of the other prefills
        self._spare: list[int] = []  # that run and are best effort, by admission
        self._left: dict[int, int] = {}  # prompt tokens that prefills have to compute, by slot
        self._allotted: dict[int, int] = {}  # of these in this step

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Count how long its answer was."""
        self._num_ended += 1
        self._num_output_tokens += num_output_tokens

    def order(self, view: SchedulerView) -> Int32Array:
        """Return the waiting ones of the plan by deadline, then the others."""
        self._plan(view)
        self._is_planned = True
        waits = set(view.waiting.tolist())
        first = [slot for slot in (*self._standard, *self._others) if slot in waits]
        rest = waits.difference(first)
        return np.array([*first, *(slot for slot in view.waiting.tolist() if slot in rest)], np.int32)

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the youngest best-effort one if a standard request waits."""
        if slot not in self._standard:
            return -1
        spare = [one for one in candidates.tolist() if one in self._spare]
        return int(spare[-1]) if spare else -1

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the youngest best-effort one; if there is none, who has the most time for the next token."""
        spare = [one for one in candidates.tolist() if one in self._spare]
        if spare:
            return int(spare[-1])
        due_s = _due_s(view, candidates)
        return int(candidates[len(due_s) - 1 - int(np.argmax(due_s[::-1]))])

    def steady_steps(self, view: SchedulerView) -> int:
        """Return no limit: every decode has its token in every step."""
        return 1 << 30

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return all for decodes, and what the pace leaves of the step for prefills."""
        self._token_budget = token_budget
        if not self._is_planned:
            self._plan(view)
        self._is_planned = False
        self._allot(view)
        return TokenSplit(0 if self._pauses else token_budget, sum(self._allotted.values()))

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return what the plan gives it."""
        return min(num_remaining, token_budget, self._allotted.get(slot, 0))

    # ------------------------------------------------------------------------------------------------------------ the plan

    def _plan(self, view: SchedulerView) -> None:
        """Find who is standard."""
        running, waiting = view.running, view.waiting
        is_decode = _is_decode(view)
        decodes, prefills = running[is_decode], running[~is_decode]
        kept = decodes[_has_targets(view, decodes) & ~_began_late(view, decodes)]
        slots = np.concatenate([prefills, waiting]).astype(np.int32)
        has = np.concatenate([view.num_computed_tokens[prefills], view.prefix_tokens(waiting)])
        left = np.maximum(view.num_tokens[slots] - has, 1)
        self._left = dict(zip(slots.tolist(), left.tolist(), strict=True))
        planned, late = self._in_time(view, slots, left)
        needed = -(-self._ends(view, kept) // view.block_size)
        paced = kept[np.isfinite(view.tpot_target_s[kept])]
        self._slack_s = self._slack(view, paced, decodes)
        room = Room(
            step_time=self._step_time,
            max_tokens=self._token_budget,
            num_decodes=len(decodes),
            num_context=float(view.num_tokens[decodes].sum()),
            tpot_s=float(view.tpot_target_s[paced].min(initial=math.inf)),
            slack_s=self._slack_s,
            max_step_s=self._max_step_s,
            num_blocks=int(view.num_total_blocks * (1 - _WATERMARK)) - int(needed.sum()),
            num_rows=view.num_free_rows + len(running) - len(kept),
            row_context=float(view.num_tokens[planned].mean()) if planned else 0.0,
        )
        chosen, self._pauses = admitted([self._candidate(view, slot) for slot in planned], room)
        self._standard = [planned[index] for index in chosen]
        standard = {*kept.tolist(), *self._standard}
        self._others = [slot for slot in (*planned, *late) if slot not in standard]
        self._spare = [slot for slot in running.tolist() if slot not in standard]

    def _slack(self, view: SchedulerView, paced: Int32Array, decodes: Int32Array) -> float:
        """Return how long those that decode can pause, so that the step after it is in time for all."""
        alone_s = self._step_time.step_s(float(len(decodes)), float(view.num_tokens[decodes].sum()))
        ahead_s = _due_s(view, paced) - view.now_s - alone_s
        ahead_s += self._lookahead_tokens * np.maximum(view.tpot_target_s[paced] - alone_s, 0)
        return max(0.0, float(ahead_s.min(initial=_FAR_S))) if len(decodes) else 0.0

    def _in_time(self, view: SchedulerView, slots: Int32Array, left: Int64Array) -> tuple[list[int], list[int]]:
        """Return the prefills to plan for, by deadline, and the others: those that run first, then by arrival."""
        due_s = _due_s(view, slots)
        is_late = view.now_s + self._step_time.step_s(left.astype(np.float64)) > due_s + _LITTLE_S
        is_late = np.where(np.isinf(view.first_token_s[slots]), is_late, _began_late(view, slots))
        by_deadline = np.lexsort((slots, view.arrival_s[slots], due_s))
        is_planned = (_has_targets(view, slots) & ~is_late)[by_deadline]
        planned = slots[by_deadline[is_planned]].tolist()
        others = slots[by_deadline[~is_planned]]
        others = others[np.lexsort((others, view.arrival_s[others], view.num_blocks[others] == 0))]
        return planned[: self._max_candidates], planned[self._max_candidates :] + others.tolist()

    def _candidate(self, view: SchedulerView, slot: int) -> Candidate:
        one, left = np.array([slot], np.int32), self._left[slot]
        within_s = min(float(_due_s(view, one)[0]) - view.now_s, _FAR_S)
        within_s = max(within_s, self._step_time.step_s(float(left)))  # who was preempted is behind its pace
        num_blocks = -(-int(self._ends(view, one)[0]) // view.block_size)
        return Candidate(within_s, left, num_blocks, float(view.tpot_target_s[slot]))

    def _ends(self, view: SchedulerView, slots: Int32Array) -> Int64Array:
        """Return how many tokens each slot is expected to have in the end."""
        expected = view.num_prompt_tokens[slots] + self._num_output_tokens // self._num_ended
        return np.minimum(np.maximum(expected, view.num_tokens[slots] + view.block_size), view.max_total_tokens[slots])

    # ------------------------------------------------------------------------------------------------------------ the step

    def _allot(self, view: SchedulerView) -> None:
        """Give the prompt tokens of this step to prefills, in the order of the plan."""
        self._allotted = {}
        decodes = view.running[_is_decode(view)]
        state = (len(view.running), int(view.num_computed_tokens[view.running].sum()))
        self._pauses, self._paused = self._pauses and state != self._paused, state if self._pauses else None
        if self._pauses:
            until_s = min(self._max_step_s, self._slack_s, self._first_s(view)) - _LITTLE_S
            self._give(view, self._standard, self._token_budget, until_s - self._step_time.base_s)
            self._pauses = bool(self._allotted)
            if self._pauses:
                return
        pace_s = self._pace_s(view, decodes) - _LITTLE_S
        alone_s = self._step_time.step_s(float(len(decodes)), float(view.num_tokens[decodes].sum()))
        most = self._token_budget - len(decodes)
        most, left_s = self._give(view, self._standard, most, pace_s - alone_s)
        if math.isfinite(pace_s):
            left_s -= (1 - self._best_effort_share) * pace_s
        self._give(view, self._others, most, left_s)
        if not self._allotted and not len(decodes):  # no step keeps the pace
            self._allotted = dict.fromkeys((*self._standard, *self._others)[:1], view.block_size)

    def _give(self, view: SchedulerView, slots: list[int], most: int, left_s: float) -> tuple[int, float]:
        """Give tokens of this step to prefills, one after the other; return the tokens and seconds that are left."""
        token_s = self._step_time.token_s + self._step_time.context_token_s
        for slot in slots:
            left_s -= self._step_time.context_token_s * (int(view.num_tokens[slot]) - self._left[slot])
            chunk = int(min(self._left[slot], most, left_s / token_s if token_s else math.inf))
            if chunk < 1:
                break
            self._allotted[slot] = chunk
            most, left_s = most - chunk, left_s - token_s * chunk
        return most, left_s

    def _pace_s(self, view: SchedulerView, decodes: Int32Array) -> float:
        """Return how long this step may take."""
        kept = decodes[~np.isin(decodes, self._spare)]
        tpot_s = view.tpot_target_s[kept]
        until_s = _due_s(view, kept) - view.now_s
        pace_s = float(np.clip(until_s, _CATCH_UP * tpot_s, tpot_s).min(initial=math.inf))
        if not self._standard:
            return pace_s
        pace_s = float(view.tpot_target_s[self._standard].min(initial=pace_s))
        # A shorter step, if the first deadline comes before it ends and can be kept.
        first, first_s = self._standard[0], self._first_s(view)
        context = float(view.num_tokens[decodes].sum() + view.num_tokens[first])
        fits = self._step_time.step_s(float(self._left[first] + len(decodes)), context) <= first_s
        return min(pace_s, first_s) if fits else pace_s

    def _first_s(self, view: SchedulerView) -> float:
        """Return in how many seconds the first standard prefill is due."""
        return float(_due_s(view, np.array(self._standard[:1], np.int32))[0]) - view.now_s


# -------------------------------------------------------------------------------------------------------- parts of the view


def _is_decode(view: SchedulerView) -> BoolArray:
    """Return which of those that run have one token to compute."""
    return view.num_tokens[view.running] - view.num_computed_tokens[view.running] <= 1


def _has_targets(view: SchedulerView, slots: Int32Array) -> BoolArray:
    return np.isfinite(view.ttft_target_s[slots]) | np.isfinite(view.tpot_target_s[slots])


def _began_late(view: SchedulerView, slots: Int32Array) -> BoolArray:
    """Return which had their first token after its deadline."""
    first_s = view.first_token_s[slots]
    return np.isfinite(first_s) & (first_s > view.arrival_s[slots] + view.ttft_target_s[slots])


def _due_s(view: SchedulerView, slots: Int32Array) -> FloatArray:
    """Return when the next token of each slot is due, engine clock, seconds: the first by TTFT, the others by TPOT after it."""
    first_s = view.first_token_s[slots]
    num_output = np.maximum(view.num_tokens[slots] - view.num_prompt_tokens[slots], 1)
    before_first_s = view.arrival_s[slots] + view.ttft_target_s[slots]
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(first_s), before_first_s, first_s + num_output * view.tpot_target_s[slots])
