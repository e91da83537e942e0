"""A replica drawn at random: what each client does that knows nothing of loads, and the baseline of two choices.

Name it by import path, ``router.name = "examples.gallery.two_choices.random_choice:RandomChoice"``.
"""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import ComponentContext, ReplicaViews, Router, RoutingRequest

__all__ = ["RandomChoice"]


class RandomChoice(Router):
    """Any healthy replica, all with the same probability.

    Args:
        context: Gives the seed of the draws, which depend on it and on the number of requests before.
    """

    def __init__(self, context: ComponentContext) -> None:
        self._seed = context.seed
        self._num_selected = 0

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return what the next draw gives."""
        healthy = np.flatnonzero(replicas.is_healthy)
        draws = np.random.Generator(np.random.Philox(key=self._seed, counter=self._num_selected))
        return int(healthy[draws.integers(len(healthy))])

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return what the next draw gives, and go on."""
        chosen = self.peek(request, replicas)
        self._num_selected += 1
        return chosen
