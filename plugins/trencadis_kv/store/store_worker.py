"""The worker side of a connector over a store."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.interfaces import KVPool, KVWorkerSide, SupportsRemoteScheduler
from trencadis.records import ConnectorReport, KVLayout
from trencadis_kv.store.journal import Journal
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.messages import StepOrders, decode_orders
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.saves import Saves
from trencadis_kv.store.staging import Staging

__all__ = ["StoreWorker"]


class StoreWorker(KVWorkerSide, SupportsRemoteScheduler):
    """Starts loads and saves, which run on threads.

    Args:
        parts: Shared state of the connector.
        staging: Staging memory for saves.
    """

    def __init__(self, parts: StoreParts, staging: Staging) -> None:
        self._parts = parts
        self._staging = staging
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._pool: KVPool | None = None
        self._journal: Journal | None = None
        self._expects_layers = False

    def register(self, kv_cache: KVPool) -> None:
        """Receive the KV pool, which holds whole blocks unless :meth:`on_ranks` says that it does not."""
        self._pool = kv_cache

    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Move this rank's part of each block, and record changes of the scheduler side's state for it."""
        self._journal, self._parts = _reporting(self._parts)
        self._open(layouts, rank=rank, is_remote=True)
        if self._parts.watch is not None:
            index = self._journal.of("index")
            index.clear(f"kv1/rank{rank}/")
            self._parts.watch(lambda key, is_there: index.add(key) if is_there else index.remove(key))

    def _open(self, layouts: Sequence[KVLayout], *, rank: int = 0, is_remote: bool = False) -> None:
        assert self._pool is not None, "registered before"
        reads, writes = self._parts.of_rank(layouts, rank=rank, is_remote=is_remote)
        self._loads = Loads(self._parts, self._pool, reads)
        self._saves = Saves(self._parts, self._pool, writes, self._staging)

    def expect_layers(self) -> None:
        """Let the next step's saves be copied while it runs, if configured."""
        self._expects_layers = self._parts.settings.layerwise_saves

    def begin_step(self, message: bytes) -> None:
        """Copy out blocks to be saved, cancel and start loads.

        In this order: a saved block may be the target of a load. A load that was cancelled since it was ordered never
        starts.
        """
        expects_layers, self._expects_layers = self._expects_layers, False
        orders = decode_orders(message)
        if self._loads is None and self._pool is not None:
            self._open([self._pool.layout])
        if self._loads is None or self._saves is None:
            return
        by_layer = expects_layers and self._saves.by_layer and not _share_blocks(orders)
        for save in orders.saves:
            self._saves.stage(save, by_layer=by_layer)
        for transfer_id in orders.cancels:
            self._loads.cancel(transfer_id)
        for load in orders.loads:
            if load.transfer_id not in orders.cancels:
                self._loads.start(load)

    @property
    def wants_layers(self) -> bool:
        """True while blocks are being copied out."""
        return self._saves is not None and self._saves.is_copying

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Copy a layer out before the step writes to it; loads are not layer-wise here."""
        if self._saves is not None:
            self._saves.copy_layer(layer)
        return True

    def end_step(self) -> None:
        """Queue the copied blocks for writing."""
        if self._saves is not None:
            self._saves.finish()

    def poll(self) -> ConnectorReport:
        """Return the report of ended loads."""
        report = ConnectorReport() if self._loads is None else self._loads.poll()
        return report if self._journal is None else attrs.evolve(report, messages=self._journal.take())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the threads of both sides are idle, or wait for :meth:`poll`; False on timeout.

        Args:
            timeout_s: Seconds of real time.
        """
        return self._parts.activity.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop loads, write staged blocks, stop the threads."""
        timeout_s = self._parts.settings.close_timeout_s
        if self._loads is not None:
            self._loads.close(timeout_s)
        if self._saves is not None:
            self._saves.close(timeout_s)


def _reporting(parts: StoreParts) -> tuple[Journal, StoreParts]:
    """Return a journal, and the parts with recorders in place of the scheduler side's state, which is in another process."""
    journal = Journal()
    shared = {name: journal.of(name) for name in ("counters", "breaker", "cost", "recent")}
    return journal, attrs.evolve(parts, **shared)


def _share_blocks(orders: StepOrders) -> bool:
    """Return whether a load writes to a block to be saved, which then cannot be copied layer by layer."""
    loaded = {block for load in orders.loads for block in load.blocks}
    return any(not loaded.isdisjoint(save.blocks) for save in orders.saves)
