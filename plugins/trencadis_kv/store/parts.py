"""State shared by both sides of a connector over a store; see :mod:`~trencadis_kv.store.journal` where they are in two processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import KVLayout
from trencadis_kv.interfaces import KVCodec, KVPolicy
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.bounded import RecentHashes
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.objects import BlockObjects, StoredBlocks
from trencadis_kv.store.pace import Pace
from trencadis_kv.store.settings import SharedStoreSettings, StoreSettings
from trencadis_kv.store.shards import RankShard, Shard, cut_blocks, shards_of_ranks

__all__ = ["CHUNK_BYTES", "StoreParts"]

logger = logging.getLogger("trencadis.kv")

CHUNK_BYTES = 2 << 20
"""Most bytes of blocks that one call reads or writes: a call that fails loses no more, and the first bytes are still in
a processor's cache when all of them are verified."""


@attrs.frozen(kw_only=True, eq=False)
class StoreParts:
    """Settings, collaborators and records of one connector.

    Attributes:
        name: Name of the connector, in logs and metrics.
        settings: Settings from its config table.
        clock: The engine's clock.
        identity: Identity of the model.
        make_store: Returns a new connection to the store.
        codec: KV codec of the payloads.
        policy: KV policy; decides which blocks are loaded and saved.
        counters: Transfer counters.
        breaker: Circuit breaker; decides whether the store is used.
        cost: Predicts the time of loads and prefills.
        pace: Throttles loads while the engine computes.
        recent: Hashes of blocks that the store probably has.
        activity: Counts tasks in flight on threads.
        warned: Causes of failures that were logged already.
        label: Name of the connector and its distribution, for messages; empty: ``name``.
        watch: Sets a callback ``on_change(key, is_there)`` for each object that comes or goes, for a store that each
            process has to itself; None: all ranks reach the same store.
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
    watch: Callable[[Callable[[str, bool], None]], None] | None = None

    def client(self) -> StoreClient:
        """Return a new connection for one thread."""
        return StoreClient(self.make_store, name=self.label or self.name)

    def shards(self, layouts: Sequence[KVLayout], *, is_remote: bool = False) -> list[Shard]:
        """Return the shards of blocks.

        Args:
            layouts: KV layout of each rank's part of a block, by rank.
            is_remote: Whether the ranks are in other processes.

        Raises:
            ConfigValueError: Blocks cannot be split as the settings say.
        """
        if self.watch is not None and is_remote:
            return shards_of_ranks(layouts)
        settings = self.settings
        if not isinstance(settings, SharedStoreSettings):
            return cut_blocks(layouts, saves=settings.saves)
        return cut_blocks(
            layouts,
            head_groups=settings.head_groups,
            layer_starts=settings.layer_starts,
            saves=settings.saves,
            table=f"kv_connector.{self.name}",
        )

    def stored(self, layouts: Sequence[KVLayout], *, is_remote: bool = False) -> StoredBlocks:
        """Return the objects of blocks on all ranks; otherwise as :meth:`shards`."""
        shards = self.shards(layouts, is_remote=is_remote)
        return StoredBlocks(
            [self.objects(one.layout, namespace=one.namespace) for one in shards],
            block_bytes=max(one.block_bytes for one in layouts),
        )

    def of_rank(
        self, layouts: Sequence[KVLayout], *, rank: int = 0, is_remote: bool = False
    ) -> tuple[list[RankShard], list[RankShard]]:
        """Return the shards that a rank reads, and those that it writes; otherwise as :meth:`shards`."""
        shards = self.shards(layouts, is_remote=is_remote)
        here = [
            (one, RankShard.of(one, layouts[rank], self.objects(one.layout, namespace=one.namespace)))
            for one in shards
            if rank in one.readers
        ]
        return [shard for _, shard in here], [shard for one, shard in here if one.writer == rank]

    def objects(self, layout: KVLayout, *, namespace: str = "") -> BlockObjects:
        """Return the converter between blocks, or shards, of a layout and objects; without a namespace that of the settings."""
        return BlockObjects(
            layout,
            identity=self.identity,
            namespace=namespace or self.settings.namespace,
            exact_numerics=self.settings.numerics == "exact",
            codec=self.codec,
        )

    def failed(self, error: TransferError, what: str) -> None:
        """Count a failure; the first of each cause is logged as a warning. From any thread.

        Args:
            error: Error to count and log.
            what: Operation that failed, such as ``load``.
        """
        self.counters.failed(error.cause)
        self.breaker.failed(error.cause)
        level = logging.DEBUG if error.cause in self.warned else logging.WARNING
        self.warned.add(error.cause)
        logger.log(level, "KV %s of %s failed (%s): %s", what, self.label or self.name, error.cause, error)
