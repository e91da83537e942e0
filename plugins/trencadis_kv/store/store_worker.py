"""The worker side of a connector over a store."""

from __future__ import annotations

from trencadis.interfaces import KVPool, KVWorkerSide
from trencadis.records import ConnectorReport
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.messages import StepOrders, decode_orders
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.saves import Saves
from trencadis_kv.store.staging import Staging

__all__ = ["StoreWorker"]


class StoreWorker(KVWorkerSide):
    """Starts loads and saves, which run on threads.

    Args:
        parts: Of the connector.
        staging: Memory for saves.
    """

    def __init__(self, parts: StoreParts, staging: Staging) -> None:
        self._parts = parts
        self._staging = staging
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._expects_layers = False

    def register(self, kv_cache: KVPool) -> None:
        """Receive the KV pool."""
        objects = self._parts.objects(kv_cache.layout)
        self._loads = Loads(self._parts, kv_cache, objects)
        self._saves = Saves(self._parts, kv_cache, objects, self._staging)

    def expect_layers(self) -> None:
        """Let the next step's saves be copied while it runs, if configured."""
        self._expects_layers = self._parts.settings.layerwise_saves

    def begin_step(self, message: bytes) -> None:
        """Copy out blocks to be saved, cancel and start loads.

        In this order: a block may be saved and then given to a load. A load that was cancelled since it was ordered never starts.
        """
        expects_layers, self._expects_layers = self._expects_layers, False
        orders = decode_orders(message)
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
        return ConnectorReport() if self._loads is None else self._loads.poll()

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


def _share_blocks(orders: StepOrders) -> bool:
    """Return whether a load writes to a block to be saved: then it cannot be copied layer by layer."""
    loaded = {block for load in orders.loads for block in load.blocks}
    return any(not loaded.isdisjoint(save.blocks) for save in orders.saves)
