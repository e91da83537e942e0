"""First come, first served."""

from __future__ import annotations

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis_plugins.scheduling.config import FcfsConfig

__all__ = ["Fcfs"]


class Fcfs(SchedulingPolicy):
    """Decodes first, then prompts in order of arrival, cut into chunks to fit; the youngest loses its blocks.

    That is what the contract's defaults do. Two caps trade the speed of new prompts for an even pace of running texts:
    a step takes as long as its tokens, and every decode in it waits for all of them. Keeps no state.

    Args:
        config: The caps.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.
    """

    def __init__(self, config: FcfsConfig | None = None) -> None:
        config = config if config is not None else FcfsConfig()
        self._max_prefill_tokens = config.max_prefill_tokens
        self._max_chunk = config.long_prefill_threshold

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the whole budget for decodes, and what ``max_prefill_tokens`` allows of the rest for prefills."""
        return TokenSplit(decode=token_budget, prefill=min(token_budget, self._max_prefill_tokens or token_budget))

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return all that is left of the prompt, at most the budget and ``long_prefill_threshold``."""
        return min(num_remaining, token_budget, self._max_chunk or token_budget)
