"""First come, first served."""

from __future__ import annotations

from trencadis.interfaces import SchedulerView, SchedulingPolicy, SupportsSteadySteps, TokenSplit, plain_state
from trencadis.records import Int32Array, StepTime
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.victims import VICTIMS

__all__ = ["MANY_STEPS", "Chunks", "Fcfs"]

MANY_STEPS = 1 << 30
"""That a step plan holds for: as long as nothing else changes."""


class Chunks:
    """Sizes chunks of prompts. Keeps no state.

    Args:
        config: The caps, the target and the step-time model.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.
    """

    def __init__(self, config: FcfsConfig) -> None:
        self.step_time = StepTime(
            base_s=config.step_ms / 1e3,
            token_s=config.token_us / 1e6,
            context_token_s=config.context_token_us / 1e6,
        )
        self._max_prefill_tokens = config.max_prefill_tokens
        self._max_chunk = config.long_prefill_threshold
        self._target_s = config.tpot_target_ms / 1e3
        self._sizes = sorted(config.chunk_sizes, reverse=True)

    def prefill_budget(self, view: SchedulerView, *, token_budget: int, target_s: float = 0.0) -> int:
        """Return how many prompt tokens a step may compute so that its decodes keep their pace. Pure.

        At least a block, so that prompts get on even where decodes alone miss the target.

        Args:
            view: The state.
            token_budget: Token budget of the step.
            target_s: Most seconds of this step; 0: the configured target, if there is one.
        """
        budget = min(token_budget, self._max_prefill_tokens or token_budget)
        target_s = target_s or self._target_s
        num_decodes = view.running.size
        if not target_s or not num_decodes:
            return budget
        context = int(view.num_computed_tokens[view.running].sum())
        room = self.step_time.max_tokens(target_s, context) - num_decodes
        # A hair more, as a quotient that should be whole may come out a hair less.
        return int(min(budget, max(room + 1e-6, view.block_size)))

    def chunk(self, *, num_remaining: int, token_budget: int) -> int:
        """Return how many tokens of one prompt to compute now; a part of it only in one of ``chunk_sizes``. Pure."""
        chunk = min(num_remaining, token_budget, self._max_chunk or token_budget)
        if chunk == num_remaining:
            return chunk
        return next((size for size in self._sizes if size <= chunk), chunk)


@plain_state
class Fcfs(SchedulingPolicy, SupportsSteadySteps):
    """Decodes first, then prompts in order of arrival, cut into chunks to fit; the youngest loses its blocks.

    That is what the contract's defaults do. Caps and a target trade the speed of new prompts for an even pace of running texts:
    a step takes as long as its tokens, and every decode in it waits for all of them. Keeps no state.

    Args:
        config: Caps, target, and choice of victim.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.
    """

    def __init__(self, config: FcfsConfig | None = None) -> None:
        config = config if config is not None else FcfsConfig()
        self.chunks = Chunks(config)
        self._victim = VICTIMS[config.victim]

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the whole budget for decodes, and what caps and target allow of the rest for prefills."""
        return TokenSplit(token_budget, self.chunks.prefill_budget(view, token_budget=token_budget))

    def steady_steps(self, view: SchedulerView) -> int:
        """Return no limit: decodes have the whole budget, whatever the time; 1 in a subclass that splits otherwise and does not say."""
        return MANY_STEPS if type(self).split is Fcfs.split else 1

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return all that is left of the prompt, cut to the budget, the cap and the sizes."""
        return self.chunks.chunk(num_remaining=num_remaining, token_budget=token_budget)

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the configured choice; the youngest by default."""
        return self._victim(view, candidates)
