"""State shared by both sides of a connector over a store, which run in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.interfaces import KVCodec, KVPolicy
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import KVLayout
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.bounded import RecentHashes
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.objects import BlockObjects
from trencadis_kv.store.pace import Pace
from trencadis_kv.store.settings import StoreSettings

__all__ = ["CHUNK_BYTES", "StoreParts"]

logger = logging.getLogger("trencadis.kv")

CHUNK_BYTES = 2 << 20
"""Most bytes of blocks that one call reads or writes: a call that fails loses no more, and what was read first is still in a processor's
cache when all of it is verified."""


@attrs.frozen(kw_only=True, eq=False)
class StoreParts:
    """Settings, collaborators and records of one connector.

    Attributes:
        name: Of the connector, in logs and metrics.
        settings: Of its config table.
        clock: The engine's.
        identity: Of the model.
        make_store: Returns a new connection to the store.
        codec: What payloads go through.
        policy: What is loaded and saved.
        counters: What was done.
        breaker: Whether the store is used.
        cost: What loads and prefills take.
        pace: When loads give way to steps.
        recent: Blocks that the store is thought to have.
        activity: Tasks under way on threads.
        warned: Causes of failures that were logged already.
        label: Names the connector and its distribution in messages; empty: ``name`` does.
    """

    name: str
    settings: StoreSettings
    clock: Clock
    identity: str
    make_store: Callable[[], BlockStore]
    codec: KVCodec
    policy: KVPolicy
    counters: TransferCounters
    breaker: Breaker
    cost: CostModel = attrs.field(
        default=attrs.Factory(lambda self: CostModel(self.clock, retry_s=self.settings.cooldown_s), takes_self=True)
    )
    pace: Pace = attrs.field(
        default=attrs.Factory(
            lambda self: Pace(self.settings.load_share, cost=self.cost, clock=self.clock), takes_self=True
        )
    )
    recent: RecentHashes = attrs.field(factory=lambda: RecentHashes(1 << 17))
    activity: Activity = attrs.field(factory=Activity)
    warned: set[str] = attrs.field(factory=set)
    label: str = ""

    def client(self) -> StoreClient:
        """Return a new connection for one thread."""
        return StoreClient(self.make_store, name=self.label or self.name)

    def objects(self, layout: KVLayout) -> BlockObjects:
        """Return the converter between blocks of a layout and objects."""
        return BlockObjects(
            layout,
            identity=self.identity,
            namespace=self.settings.namespace,
            exact_numerics=self.settings.numerics == "exact",
            codec=self.codec,
        )

    def failed(self, error: TransferError, what: str) -> None:
        """Count a failure; the first of each cause is logged as a warning. From any thread.

        Args:
            error: What happened.
            what: Such as ``load``.
        """
        self.counters.failed(error.cause)
        self.breaker.failed(error.cause)
        level = logging.DEBUG if error.cause in self.warned else logging.WARNING
        self.warned.add(error.cause)
        logger.log(level, "KV %s of %s failed (%s): %s", what, self.label or self.name, error.cause, error)
