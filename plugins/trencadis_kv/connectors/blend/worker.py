"""The worker side of ``blend``."""

from __future__ import annotations

import logging

from trencadis.errors import TrencadisError
from trencadis.interfaces import KVPool, KVWorkerSide
from trencadis.records import ConnectorReport
from trencadis_kv.connectors.blend.chunk_assemblies import ChunkAssembler
from trencadis_kv.connectors.blend.chunk_saves import ChunkSaver
from trencadis_kv.connectors.blend.messages import decode_orders
from trencadis_kv.connectors.blend.objects import ChunkObjects
from trencadis_kv.connectors.blend.shared import BlendShared

__all__ = ["BlendWorker"]

logger = logging.getLogger("trencadis.kv")


class BlendWorker(KVWorkerSide):
    """Copies chunks out, reads them, and lets the backend blend them.

    Args:
        shared: Of the connector.
    """

    def __init__(self, shared: BlendShared) -> None:
        self._shared = shared
        self._keeper: ChunkSaver | None = None
        self._filler: ChunkAssembler | None = None

    def register(self, kv_cache: KVPool) -> None:
        """Take the device's blocks; where nothing blends, say so once, and do nothing from then on."""
        try:
            blender = kv_cache.blender()
            reason = "this backend cannot blend"
        except TrencadisError as error:
            blender, reason = None, str(error)
        if blender is None:
            logger.warning(
                "The KV connector blend has nothing to do: %s. Every request is computed.", reason.rstrip(".")
            )
            return
        objects = ChunkObjects(kv_cache.layout, identity=self._shared.identity, token_bytes=blender.token_bytes)
        self._keeper = ChunkSaver(self._shared, kv_cache, blender, objects)
        self._filler = ChunkAssembler(self._shared, blender, objects)
        self._shared.token_bytes = blender.token_bytes

    def begin_step(self, message: bytes) -> None:
        """Copy out what is to be kept, then give up, begin and go on with fills."""
        if self._keeper is None or self._filler is None:
            return
        orders = decode_orders(message)
        for keep in orders.keeps:
            self._keeper.keep(keep)
        for transfer_id in orders.cancels:
            self._filler.cancel(transfer_id)
        for fill in orders.fills:
            self._filler.begin(fill)
        self._filler.advance()

    def end_step(self) -> None:
        """Nothing is left to secure."""

    def poll(self) -> ConnectorReport:
        """Return what ended."""
        return ConnectorReport() if self._filler is None else self._filler.poll()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the threads have nothing to do; False if that takes longer.

        Args:
            timeout_s: Seconds of real time.
        """
        return self._shared.activity.wait_idle(timeout_s)

    def close(self) -> None:
        """End the threads, and let go of the model."""
        timeout_s = self._shared.config.close_timeout_s
        keeper, self._keeper = self._keeper, None
        filler, self._filler = self._filler, None
        if filler is not None:
            filler.close(timeout_s)
        if keeper is not None:
            keeper.close(timeout_s)
