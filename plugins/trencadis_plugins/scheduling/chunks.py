"""How many prompt tokens a step takes: a fixed number, or what a target for the pace of running texts leaves."""

from __future__ import annotations

from trencadis.interfaces import SchedulerView
from trencadis.records import StepTime
from trencadis_plugins.scheduling.config import FcfsConfig

__all__ = ["Chunks"]


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
            token_budget: Of the step.
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
