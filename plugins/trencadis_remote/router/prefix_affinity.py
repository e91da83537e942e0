"""The replica that has most of the prompt in its prefix cache, as far as loads allow."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.router.config import PrefixAffinityConfig
from trencadis_remote.router.loads import is_imbalanced, least, loads

__all__ = ["PrefixAffinity"]


class PrefixAffinity(Router):
    """The largest ``prefix_weight · share of the prompt − load_weight · load / mean load``; equals take turns.

    While loads differ too much, as SGLang's ``cache_aware`` defines it, the least loaded one. Which replica has which blocks the
    replicas say themselves; those of requests on their way count, too.

    Args:
        config: Weights and thresholds.
    """

    needs_prefixes = True

    def __init__(self, config: PrefixAffinityConfig | None = None) -> None:
        self._config = config or PrefixAffinityConfig()
        self._next = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the best one."""
        config, load = self._config, loads(replicas)
        if not request.block_hashes or is_imbalanced(
            load, replicas, absolute=config.balance_abs_threshold, relative=config.balance_rel_threshold
        ):
            return least(load, replicas, first=self._next)
        mean = max(
            float(load[replicas.is_healthy].mean()), 1.0
        )  # a replica with one request is not much worse than an idle one
        cost = load * (config.load_weight / mean)
        cost -= replicas.hit_blocks * np.float64(config.prefix_weight / len(request.block_hashes))
        return least(cost, replicas, first=self._next)

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the best one; among equals the next one has its turn then."""
        chosen = self.peek(request, replicas)
        self._next = chosen + 1
        return chosen
