"""SGLang's rule: the replica that was sent the longest part of a prompt, unless loads are too far apart."""

from __future__ import annotations

from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.router.config import CacheAwareConfig
from trencadis_remote.router.loads import is_imbalanced, least
from trencadis_remote.router.radix_tree import RadixTree

__all__ = ["CacheAware"]


class CacheAware(Router):
    """Imbalanced: the least loaded replica. Else the one that was sent more than a share of the prompt last; else the least loaded one.

    Every decision is put into the tree. A replica that is not healthy any more loses its prompts to the first healthy one.

    Source: sgl-model-gateway, ``src/policies/cache_aware.rs``; there the tree is of characters, here of tokens. Loads are the
    requests of each replica, as there.

    Args:
        config: Thresholds and the size of the tree.
    """

    def __init__(self, config: CacheAwareConfig | None = None) -> None:
        self._config = config or CacheAwareConfig()
        self._tree = RadixTree(self._config.max_tree_tokens)

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the one by the rule."""
        config, load = self._config, replicas.num_live.astype("f8")
        if is_imbalanced(load, replicas, absolute=config.balance_abs_threshold, relative=config.balance_rel_threshold):
            return least(load, replicas)
        length, replica = self._tree.match(request.token_ids)
        if length <= config.cache_threshold * len(request.token_ids):
            return least(load, replicas)
        return replica if replicas.is_healthy[replica] else int(replicas.is_healthy.argmax())

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        """Return the one by the rule, and put the prompt into the tree."""
        chosen = self.peek(request, replicas)
        self._tree.insert(request.token_ids, chosen)
        return chosen

    def on_replica_removed(self, replica: int) -> None:
        """Forget what it was sent: its cache is gone."""
        self._tree.remove(replica)
