"""The least work first."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView
from trencadis.records import Int32Array, Request
from trencadis_plugins.scheduling.config import ShortestFirstConfig
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.predictors import make_predictor

__all__ = ["ShortestFirst"]


class ShortestFirst(Fcfs):
    """Admits what is expected to be done soonest: tokens to compute, and output tokens that are still to come, weighted.

    Waiting makes up for work, as ``work + arrival × age_tokens_per_s`` is the key.

    Args:
        config: Predictor, weight of outputs, ageing.

    Source: shortest job first; ranking by predictions is enough, as only the order matters: Fu et al., "Efficient LLM Scheduling
    by Learning to Rank", NeurIPS 2024.
    """

    def __init__(self, config: ShortestFirstConfig | None = None) -> None:
        config = config if config is not None else ShortestFirstConfig()
        super().__init__(config)
        self._predictor = make_predictor(config.predictor)
        self._output_weight = config.output_weight
        self._age_tokens_per_s = config.age_tokens_per_s

    def on_added(self, *, slot: int, request: Request) -> None:
        """Let the predictor see it."""
        self._predictor.on_added(slot, request)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by work, the least first; equal ones stay in order."""
        waiting = view.waiting
        num_tokens = view.num_tokens[waiting]
        done = num_tokens - view.num_prompt_tokens[waiting]
        to_come = np.maximum(self._predictor.expected(view, waiting) - done, 0)
        work = num_tokens + self._output_weight * to_come
        return waiting[np.argsort(work + self._age_tokens_per_s * view.arrival_s[waiting], kind="stable")]

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Let the predictor learn."""
        self._predictor.on_finished(tenant, num_output_tokens)
