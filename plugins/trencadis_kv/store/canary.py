"""Probe of a store with one small object, so that a bad configuration is noticed at start-up."""

from __future__ import annotations

import secrets
import threading

from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import KVLayout, KVPart, TransferCause
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.objects import StoredBlocks
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.threads import StoreThreads

__all__ = ["Canary", "try_store"]

_PAYLOAD_BYTES = 64
_NO_MODELS = KVLayout(
    parts=(KVPart(layer=0, kind="key", num_heads=1, head_dim=_PAYLOAD_BYTES, dtype="uint8", item_bytes=1),),
    block_size=1,
    last_head=1,
    numerics="none",
)
"""Layout of blocks that no engine asks for."""


class Canary:
    """Puts an object, gets it back, deletes it, and reports to the breaker. A task for a thread.

    In a store that works it leaves a description of the blocks, or of each of their shards. For a connector that only
    loads it asks for an object that does not exist; for one that only saves it reads nothing back.

    Args:
        parts: Shared state of the connector.
        objects: Objects of the connector; the first shard packs the probe's object.
        describes: Whether to leave the description.

    Attributes:
        error: Reason why the store cannot be used, or None.
        is_wanted: False once no thread waits for the result.
    """

    def __init__(self, parts: StoreParts, objects: StoredBlocks, *, describes: bool = True) -> None:
        self._parts = parts
        self._objects = objects
        self._describes = describes
        self._done = threading.Event()
        self.error: TransferError | None = None
        self.is_wanted = True

    def run(self, client: StoreClient) -> None:
        """Probe the store."""
        try:
            client.call(self._try)
        except TransferError as error:
            self.error = error
            self._parts.counters.failed(error.cause)
        self._parts.breaker.probed(works=self.error is None)
        self._done.set()

    def wait(self, timeout_s: float) -> TransferError | None:
        """Return the reason why the store cannot be used, or None.

        Args:
            timeout_s: Seconds of real time; a store that takes longer cannot be used.
        """
        if not self._done.wait(timeout_s):
            self.is_wanted = False
            return TransferError(f"it did not answer within {timeout_s:g} s.", cause=TransferCause.DEADLINE)
        return self.error

    def _try(self, store: BlockStore) -> None:
        settings, block_hash = self._parts.settings, secrets.token_bytes(32)
        objects, payload = self._objects.shards[0], secrets.token_bytes(_PAYLOAD_BYTES)
        keys = objects.keys([block_hash])
        num_kept = 0
        if settings.saves:
            num_kept = store.put(keys, [objects.pack(block_hash, memoryview(payload))])
        if settings.loads:
            self._get(store, keys, block_hash, payload if num_kept else b"")
        if num_kept:
            store.delete(keys)
        if num_kept and self._describes:
            for key, description in (shard.description for shard in self._objects.shards):
                store.put([key], [[memoryview(description)]])

    def _get(self, store: BlockStore, keys: list[str], block_hash: bytes, payload: bytes) -> None:
        """Get the object back; a full store that did not keep it counts as readable."""
        objects = self._objects.shards[0]
        raw = bytearray(objects.max_bytes)
        (num_bytes,) = store.get(keys, [memoryview(raw)])
        if num_bytes < 0 or not payload:
            return
        out = bytearray(_PAYLOAD_BYTES)
        objects.unpack(block_hash, memoryview(raw)[:num_bytes], memoryview(out))
        if out != payload:
            raise TransferError("it gave back another object than was put.", cause=TransferCause.CORRUPT)


def try_store(parts: StoreParts) -> TransferError | None:
    """Return why the store of a connector without an engine cannot be used, or None; removes the probe's object.

    Takes at most ``start_timeout_s``, and ``close_timeout_s`` more if the store's call does not return.

    Args:
        parts: Shared state of the connector.
    """
    canary = Canary(parts, parts.stored([_NO_MODELS]), describes=False)
    threads: StoreThreads[Canary] = StoreThreads(
        "trencadis-kv-trial", 1, make_client=parts.client, activity=parts.activity
    )
    threads.put(canary)
    error = canary.wait(parts.settings.start_timeout_s)
    threads.close(parts.settings.close_timeout_s)
    return error
