"""What both sides of ``blend`` share: they live in one process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import attrs

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.interfaces import KVPolicy
from trencadis.interfaces.block_store import BlockStore
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.counters import TransferCounters

__all__ = ["BlendShared"]

logger = logging.getLogger("trencadis.kv")


@attrs.define(kw_only=True, eq=False)
class BlendShared:
    """Settings, collaborators and news of one connector.

    Attributes:
        config: Its table.
        clock: The engine's.
        identity: Of the model.
        make_store: Returns a new connection to the chunks.
        policy: What is put together.
        counters: What was done.
        cost: What reading chunks and computing tokens take.
        activity: Tasks under way on threads.
        token_bytes: Of a token in a chunk; 0 while nothing blends here: then nothing is kept or found.
        kept: Numbers of chunks that are in the store by now; the worker side adds, the scheduler side takes.
        lost: Numbers of chunks that will not be.
        blended: Transfer ids and the seconds that blending took.
    """

    config: BlendConfig
    clock: Clock
    identity: str
    make_store: Callable[[], BlockStore]
    policy: KVPolicy
    counters: TransferCounters = attrs.field(factory=lambda: TransferCounters("blend"))
    cost: CostModel = attrs.field(factory=CostModel)
    activity: Activity = attrs.field(factory=Activity)
    token_bytes: int = 0
    kept: deque[int] = attrs.field(factory=deque)
    lost: deque[int] = attrs.field(factory=deque)
    blended: deque[tuple[int, float]] = attrs.field(factory=deque)

    def client(self) -> StoreClient:
        """Return a new connection for one thread."""
        return StoreClient(self.make_store, name="blend")

    def failed(self, error: TransferError, what: str) -> None:
        """Count a failure, and log it. From any thread.

        Args:
            error: What happened.
            what: Such as ``load``.
        """
        self.counters.failed(error.cause)
        logger.warning("KV %s of blend failed (%s): %s", what, error.cause, error)
