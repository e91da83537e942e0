"""Multi-level feedback queue: requests that received little service go first, without length predictions."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView, TokenSplit, plain_state
from trencadis.records import FloatArray, Int32Array, Request
from trencadis_gallery.config import MultiLevelConfig
from trencadis_plugins.scheduling.columns import SlotColumn
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.victims import largest

__all__ = ["MultiLevel"]


@plain_state
class MultiLevel(Fcfs):
    """A multi-level feedback queue that prompts join where they fit: level i has the quantum ``quantum_tokens × 2^i`` of work.

    A sequence joins the first level whose quantum holds its prompt, and sinks a level whenever its output used the level's quantum up.
    With ``quantum_ms`` work is time instead: a prompt joins by the step-time model, and the steps that a sequence runs in use its quanta up,
    as long as they took. The highest level is admitted first, by arrival within a level; if asked to, running sequences give way to waiting ones of a
    higher level. Who waited longer than ``starve_s`` since it last ran is back on the first level.

    Args:
        config: Levels and quantum.

    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (skip-join MLFQ), section 4. Theirs counts time
    and swaps; this one counts tokens unless told otherwise, and recomputes where the engine does.
    """

    def __init__(self, config: MultiLevelConfig | None = None) -> None:
        config = config if config is not None else MultiLevelConfig()
        super().__init__(config)
        self._quantum, self._output_weight = config.quantum_tokens, config.output_weight
        self._quantum_s = config.quantum_ms / 1e3
        self._lowest = config.num_levels - 1
        self._starve_s = config.starve_s
        self._last_ran_s = SlotColumn()
        self._served_s = SlotColumn()
        self._seen_s = 0.0
        self.preempts = config.preempt

    def on_added(self, *, slot: int, request: Request) -> None:
        """Forget who had the slot."""
        self._last_ran_s[slot] = -np.inf
        self._served_s[slot] = 0.0

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Note who runs."""
        self._serve(view)
        self._last_ran_s.set_all(view.running, view.now_s)
        return super().split(view, token_budget=token_budget)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by level, then by arrival."""
        self._serve(view)
        waiting = view.waiting
        since_s = np.maximum(view.arrival_s[waiting], self._last_ran_s.of(waiting))
        levels = np.where(view.now_s - since_s > self._starve_s, 0, self.levels(view, waiting))
        return waiting[np.lexsort((view.arrival_s[waiting], levels))]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return the candidate of the lowest level if the waiting one's is higher."""
        levels = self.levels(view, candidates)
        own = float(self.levels(view, np.array([slot], np.int32))[0])
        return largest(levels, candidates) if levels.max() > own else -1

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the candidate of the lowest level, the youngest of them."""
        return largest(self.levels(view, candidates), candidates)

    def levels(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return the level of each slot by the work it had, 0 first; whole numbers. Pure."""
        prompt = view.num_prompt_tokens[slots]
        if self._quantum_s:
            prompt_s = self.chunks.step_time.step_s(prompt.astype(np.float64))
            return self._sunk(prompt_s / self._quantum_s, self._served_s.of(slots) / self._quantum_s)
        output = self._output_weight * (view.num_tokens[slots] - prompt)
        return self._sunk(prompt / self._quantum, output / self._quantum)

    def _sunk(self, prompt: FloatArray, used: FloatArray) -> FloatArray:
        """Return levels by the work of prompts and what was used of quanta, both in quanta of the first level. Pure."""
        joined = np.ceil(np.log2(np.maximum(prompt, 1)))
        # k levels further down it has used the quanta q, 2q, 4q ...: q × (2^k - 1) in all.
        sunk = np.floor(np.log2(used / 2**joined + 1))
        levels: FloatArray = np.minimum(joined + sunk, self._lowest)
        return levels

    def _serve(self, view: SchedulerView) -> None:
        """Add the time since the last call to those that run: it is that of the step in between, in which they ran."""
        if self._quantum_s:
            self._served_s.add(view.running, np.full(view.running.size, view.now_s - self._seen_s))
            self._seen_s = view.now_s
