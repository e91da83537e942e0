"""Connector over any store: makes one from a :class:`~trencadis.interfaces.block_store.BlockStore`.

Example::

    def make(config, context):
        return store_connector(lambda: MyStore(config.url), config, context, name="my_store")
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.interfaces.block_store import BlockStore
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.canary import try_store
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.defaults import codec_of, policy_of
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.staging import Staging
from trencadis_kv.store.store_scheduler import StoreScheduler
from trencadis_kv.store.store_worker import StoreWorker

__all__ = ["StoreConnector", "store_connector"]


@attrs.frozen(kw_only=True)
class StoreConnector(ConnectorPair):
    """Scheduler and worker side over a store.

    Attributes:
        with_stores: ``with_stores(wrap)`` returns a new connector of the same kind with each connection wrapped, for
            test kits that inject faults.
        try_store: Returns the error of a store that cannot be used, or None; for a pair that no engine has. May wait.
            By default always None: a store in this process.
    """

    with_stores: Callable[[Callable[[BlockStore], BlockStore]], ConnectorPair] = attrs.field(eq=False, repr=False)
    try_store: Callable[[], TransferError | None] = attrs.field(default=lambda: None, eq=False, repr=False)


def store_connector(
    make_store: Callable[[], BlockStore],
    settings: StoreSettings,
    context: ComponentContext,
    *,
    name: str,
    watch: Callable[[Callable[[str, bool], None]], None] | None = None,
) -> StoreConnector:
    """Return a connector that keeps blocks in a store.

    Nothing is connected before the engine is ready. The worker of the pair has ``wait_idle(timeout_s)``, for tests.

    Args:
        make_store: Returns a new connection; called once per thread, and may wait and raise.
        settings: Settings from the connector's config table.
        context: Context of the component's factory.
        name: Name of the component, in logs, metrics and errors.
        watch: Sets a callback for changes of a store that each process has to itself; see
            :class:`~trencadis_kv.store.parts.StoreParts`.
    """
    breaker = Breaker(
        context.clock,
        name=context.label or name,
        failure_limit=settings.failure_limit,
        failure_window_s=settings.failure_window_s,
        cooldown_s=settings.cooldown_s,
    )
    staging = Staging(settings.staging_bytes)
    counters = TransferCounters(name)
    counters.watch(breaker_state=lambda: float(breaker.state), staged_bytes=lambda: float(staging.num_bytes))
    parts = StoreParts(
        name=name,
        settings=settings,
        clock=context.clock,
        identity=context.model.identity if context.model is not None else "",
        make_store=make_store,
        codec=codec_of(context),
        policy=policy_of(context),
        counters=counters,
        breaker=breaker,
        label=context.label,
        watch=watch,
    )
    return StoreConnector(
        scheduler=StoreScheduler(parts, staging),
        worker=StoreWorker(parts, staging),
        with_stores=lambda wrap: store_connector(lambda: wrap(make_store()), settings, context, name=name, watch=watch),
        try_store=lambda: try_store(parts),
    )
