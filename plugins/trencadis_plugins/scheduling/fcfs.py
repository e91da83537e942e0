"""First come, first served."""

from __future__ import annotations

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array
from trencadis_plugins.scheduling.chunks import Chunks
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.victims import VICTIMS

__all__ = ["Fcfs"]


class Fcfs(SchedulingPolicy):
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

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return all that is left of the prompt, cut to the budget, the cap and the sizes."""
        return self.chunks.chunk(num_remaining=num_remaining, token_budget=token_budget)

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return the configured choice; the youngest by default."""
        return self._victim(view, candidates)
