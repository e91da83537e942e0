"""Several connectors as one, such as host memory, then a disk, then a store that all engines share.

                    ┌▶ child 0   the nearest: asked first, wins ties, gets what was loaded from those after it
engine ─▶ tiered ───┼▶ child 1
                    └▶ child 2
"""

from __future__ import annotations

from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, ConnectorPair, SupportsRemotePrefill
from trencadis_kv.connectors.tiered.child import Child, TierCounters
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.scheduler import RemotePrefillScheduler, TieredScheduler
from trencadis_kv.connectors.tiered.worker import TieredWorker
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.defaults import policy_of

__all__ = ["make_tiered"]


def make_tiered(config: TieredConfig, context: ComponentContext) -> ConnectorPair:
    """Return both sides over the children that the config names, each made from its own table.

    A child may come from any package; a failure of one costs only the blocks that it would have loaded or saved.

    Raises:
        ContractError: A child's factory returned something else than a connector.
        TrencadisError: A child cannot be made.
    """
    pairs = []
    for name in config.children:
        pair = context.make("kv_connector", name)
        if not isinstance(pair, ConnectorPair):
            raise ContractError(
                f"kv_connector.tiered.children: {name} is a {type(pair).__name__}, not a ConnectorPair."
            )
        pairs.append(pair)
    counters, labels = TierCounters(), [context.label_of("kv_connector", name) or name for name in config.children]
    children = [
        Child(
            name,
            pair.scheduler,
            label=label,
            breaker=_breaker(name, config, context),
            counters=counters,
            probe_s=config.lookup_timeout_s,
        )
        for name, label, pair in zip(config.children, labels, pairs, strict=True)
    ]
    brings = any(child.has(SupportsRemotePrefill) for child in children)
    scheduler = (RemotePrefillScheduler if brings else TieredScheduler)(
        children, policy=policy_of(context), clock=context.clock, config=config, counters=counters
    )
    worker = TieredWorker(config.children, [pair.worker for pair in pairs], labels=labels)
    return ConnectorPair(scheduler=scheduler, worker=worker)


def _breaker(name: str, config: TieredConfig, context: ComponentContext) -> Breaker:
    return Breaker(
        context.clock,
        name=name,
        failure_limit=config.failure_limit,
        failure_window_s=config.failure_window_s,
        cooldown_s=config.cooldown_s,
    )
