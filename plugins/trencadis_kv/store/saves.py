"""Saves on threads: a step copies blocks to bounded staging memory, threads write them to the store; blocks without room are dropped.

stage ─┬─ whole ────▶ read_blocks ─────────────────────────────────▶ queue ─▶ thread: pack ▶ put
       └─ by layer ─▶ queue ─▶ thread: read_layer 0, 1, … ─┐
                      step: copy_layer(n) before it writes ┴ finish ▶ queue ─▶ thread: pack ▶ put
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.records import TransferCause
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.layer_copy import LayerCopy, layer_places
from trencadis_kv.store.messages import SaveOrder
from trencadis_kv.store.parts import CHUNK_BYTES, StoreParts
from trencadis_kv.store.shards import RankShard
from trencadis_kv.store.staging import Staging, runs
from trencadis_kv.store.threads import StoreThreads

__all__ = ["Batch", "Saves"]


class Batch:
    """Consecutive blocks of one sequence that wait to be saved. A task for a thread.

    Args:
        hashes: Hashes of the blocks.
        slots: Slots of the staging memory that hold their bytes.
        saves: Saves of the rank, to which the batch belongs.

    Attributes:
        hashes: Hashes of the blocks.
        slots: Slots of the staging memory that hold their bytes.
        is_wanted: Always True: a save is never cancelled.
    """

    is_wanted = True

    def __init__(self, hashes: Sequence[bytes], slots: Sequence[int], saves: Saves) -> None:
        self.hashes = hashes
        self.slots = slots
        self._saves = saves

    def run(self, client: StoreClient) -> None:
        """Write the blocks that the store does not have."""
        try:
            self._saves.write(client, self)
        except TransferError as error:
            self.failed(error)
        except Exception as error:
            self.failed(TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED))
        finally:
            self.end()

    def end(self) -> None:
        """Free the staging memory."""
        self._saves.staging.give_back(self.slots)

    def failed(self, error: TransferError) -> None:
        """Count the blocks as not saved."""
        parts = self._saves.parts
        parts.recent.discard(self.hashes)
        parts.failed(error, "save")
        parts.counters.dropped(error.cause, len(self.hashes))


class Saves:
    """All saves of one rank. Methods run on the backend's thread unless stated otherwise.

    Args:
        parts: Shared state of the connector.
        pool: KV blocks on the device.
        shards: Shards of each block that this rank writes; empty: it saves nothing.
        staging: Staging memory for all saves.

    Attributes:
        parts: Shared state of the connector.
        staging: Staging memory for all saves.
    """

    def __init__(self, parts: StoreParts, pool: KVPool, shards: Sequence[RankShard], staging: Staging) -> None:
        self.parts = parts
        self.staging = staging
        self._pool = pool
        self._shards = shards
        self._places = layer_places(pool.layout)
        self._under_way: list[tuple[Batch, LayerCopy]] = []
        self._waited: set[int] = set()
        # A batch is dropped as a whole: none takes more than a quarter of the staging memory.
        block_bytes = pool.layout.block_bytes
        staging.open(block_bytes)
        self._chunk = max(1, min(CHUNK_BYTES // block_bytes, staging.num_slots // 4))
        self._threads: StoreThreads[Batch | LayerCopy] = StoreThreads(
            "trencadis-kv-save", parts.settings.num_save_threads, make_client=parts.client, activity=parts.activity
        )

    @property
    def by_layer(self) -> bool:
        """True if blocks can be copied out layer by layer."""
        return self._pool.layerwise and self._pool.any_thread

    @property
    def is_copying(self) -> bool:
        """True while layers of some blocks are still to be copied."""
        return bool(self._under_way)

    def stage(self, order: SaveOrder, *, by_layer: bool = False) -> None:
        """Copy blocks to staging memory and queue them; if the store is too slow, the oldest are dropped.

        Args:
            order: Blocks to save.
            by_layer: Whether to copy them until :meth:`finish`, each layer until :meth:`copy_layer` returns at the
                latest.
        """
        if not self._shards:
            return
        for start in range(0, len(order.blocks), self._chunk):
            blocks, hashes = order.blocks[start : start + self._chunk], order.hashes[start : start + self._chunk]
            slots = self._make_room(len(blocks))
            if not slots:
                self._drop(hashes, "staging")
                continue
            rows = [(index, self.staging.rows(first, last)) for index, first, last in runs(slots)]
            batch = Batch(hashes, slots, self)
            if by_layer:
                copy = LayerCopy(self._pool, blocks, rows, self._places)
                self._under_way.append((batch, copy))
                self._threads.put(copy)
                continue
            try:
                for index, row in rows:
                    self._pool.read_blocks(blocks[index : index + len(row)], row)
            except Exception as error:
                self._raised(batch, error)
                continue
            self._put(batch)

    def copy_layer(self, layer: int) -> None:
        """Copy a layer of all staged blocks before the step writes to it; does not raise."""
        self._waited.add(layer)
        for _, copy in self._under_way:
            copy.copy(layer)

    def finish(self) -> None:
        """Queue the copied blocks for writing, at the end of a step.

        A layer that the step did not wait for may have been overwritten before it was copied: blocks with such a layer
        are dropped.
        """
        was_waited, self._waited = self._waited.issuperset(self._places), set()
        under_way, self._under_way = self._under_way, []
        for batch, copy in under_way:
            self._threads.take_back(copy)
            copy.give_up()
            if copy.error is not None:
                self._raised(batch, copy.error)
            elif not was_waited:
                self._drop(batch.hashes, "unasked")
                batch.end()
            else:
                self._put(batch)

    def write(self, client: StoreClient, batch: Batch) -> None:
        """Write blocks that the store does not have. From a thread of this class.

        Raises:
            TransferError: The blocks cannot be written.
        """
        parts, num_shards = self.parts, len(self._shards)
        if not parts.breaker.allows:
            raise TransferError("The store is left alone.", cause=TransferCause.CANCELLED)
        by_shard = [shard.objects.keys(batch.hashes) for shard in self._shards]
        keys = [key for of_block in zip(*by_shard, strict=True) for key in of_block]
        num_there = min(max(client.call(lambda store: store.contains(keys)), 0), len(keys))
        packed = [self._packed(batch, *divmod(place, num_shards)) for place in range(num_there, len(keys))]
        if not packed:
            return
        num_kept = client.call(lambda store: store.put(keys[num_there:], packed))
        num_whole = (num_there + num_kept) // num_shards
        if num_kept < len(packed):
            parts.counters.failed(TransferCause.FULL)
            num_lost = len(batch.hashes) - num_whole
            self._drop(batch.hashes[num_there // num_shards :], TransferCause.FULL, num_blocks=num_lost)
        num_bytes = sum(piece.nbytes for pieces in packed[:num_kept] for piece in pieces)
        num_tokens = (num_whole - num_there // num_shards) * self._pool.layout.block_size
        parts.counters.moved("save", num_tokens=num_tokens, num_bytes=num_bytes)

    def _packed(self, batch: Batch, index: int, place: int) -> list[memoryview]:
        """Return the pieces of an object.

        Args:
            batch: Batch of the block.
            index: Index of the block in the batch.
            place: Index of the shard.
        """
        shard, row = self._shards[place], self.staging.rows(batch.slots[index], batch.slots[index] + 1)
        if shard.place is not None:
            data = np.empty((1, shard.objects.block_bytes), np.uint8)
            shard.place.read(row, data)
            row = data
        return shard.objects.pack(batch.hashes[index], memoryview(row[0]))

    def close(self, timeout_s: float) -> None:
        """Write staged blocks until a deadline, and stop; the last thread frees the staging memory.

        Args:
            timeout_s: Longest time to write and then to stop, each, seconds of real time.
        """
        self.finish()
        if self.parts.breaker.allows:
            self._threads.drain(timeout_s)
        while (batch := self._take_oldest()) is not None:
            self._drop(batch.hashes, "closed")
            batch.end()
        if self._threads.close(timeout_s):
            self.staging.close()

    def _make_room(self, number: int) -> list[int]:
        """Return free slots, dropping queued batches if necessary; none if batches being written occupy them."""
        while not (slots := self.staging.take(number)):
            oldest = self._take_oldest()
            if oldest is None:
                return []
            self._drop(oldest.hashes, "staging")
            oldest.end()
        return slots

    def _take_oldest(self) -> Batch | None:
        """Remove the oldest batch from the queue; earlier layer copies in the queue are left to the step."""
        while isinstance(task := self._threads.take_oldest(), LayerCopy):
            pass
        return task

    def _put(self, batch: Batch) -> None:
        if not self._threads.put(batch):
            batch.end()

    def _raised(self, batch: Batch, error: Exception) -> None:
        batch.failed(TransferError(str(error), cause=TransferCause.RAISED))
        batch.end()

    def _drop(self, hashes: Sequence[bytes], reason: str, *, num_blocks: int | None = None) -> None:
        self.parts.recent.discard(hashes)
        self.parts.counters.dropped(reason, len(hashes) if num_blocks is None else num_blocks)
