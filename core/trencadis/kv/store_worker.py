"""The worker side of a connector over a store."""

from __future__ import annotations

from trencadis.interfaces import KVPool, KVWorkerSide
from trencadis.kv.loads import Loads
from trencadis.kv.messages import decode_orders
from trencadis.kv.parts import StoreParts
from trencadis.kv.saves import Saves
from trencadis.kv.staging import Staging
from trencadis.records import ConnectorReport

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

    def register(self, kv_cache: KVPool) -> None:
        """Take the device's blocks."""
        objects = self._parts.objects(kv_cache.layout)
        self._loads = Loads(self._parts, kv_cache, objects)
        self._saves = Saves(self._parts, kv_cache, objects, self._staging)

    def begin_step(self, message: bytes) -> None:
        """Copy out what is to be saved, give up what is cancelled, start loads.

        In this order: a block may be saved and then given to a load. A load that was cancelled since it was ordered never starts.
        """
        orders = decode_orders(message)
        if self._loads is None or self._saves is None:
            return
        for save in orders.saves:
            self._saves.stage(save)
        for ticket in orders.cancels:
            self._loads.cancel(ticket)
        for load in orders.loads:
            if load.ticket not in orders.cancels:
                self._loads.start(load)

    def end_step(self) -> None:
        """Nothing is left to secure."""

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
