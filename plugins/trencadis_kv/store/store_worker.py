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
    """Starts loads and saves; threads do them.

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
        """Take the device's blocks."""
        objects = self._parts.objects(kv_cache.layout)
        self._loads = Loads(self._parts, kv_cache, objects)
        self._saves = Saves(self._parts, kv_cache, objects, self._staging)

    def expect_layers(self) -> None:
        """Let the next step's saves be copied while it is computed, if that was asked for."""
        self._expects_layers = self._parts.settings.layerwise_saves

    def begin_step(self, message: bytes) -> None:
        """Copy out what is to be saved, give up what is cancelled, start loads.

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
        """Return when the step may write to the layer: one copy, for which no budget is too small; no load comes by layer here."""
        if self._saves is not None:
            self._saves.copy_layer(layer)
        return True

    def end_step(self) -> None:
        """Have what was copied meanwhile written."""
        if self._saves is not None:
            self._saves.finish()

    def poll(self) -> ConnectorReport:
        """Return what ended."""
        return ConnectorReport() if self._loads is None else self._loads.poll()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the threads of both sides have nothing to do, or wait for :meth:`poll`; False if that takes longer.

        Args:
            timeout_s: Seconds of real time.
        """
        return self._parts.activity.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop loads, write what is staged, end the threads."""
        timeout_s = self._parts.settings.close_timeout_s
        if self._loads is not None:
            self._loads.close(timeout_s)
        if self._saves is not None:
            self._saves.close(timeout_s)


def _share_blocks(orders: StepOrders) -> bool:
    """Return whether a load writes to a block that is to be saved: threads do that at once, whatever layer the step is at."""
    loaded = {block for load in orders.loads for block in load.blocks}
    return any(not loaded.isdisjoint(save.blocks) for save in orders.saves)
