"""Saves on threads: a step copies blocks to bounded memory of our own, threads write them; what finds no room is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.kv.client import StoreClient
from trencadis.kv.messages import SaveOrder
from trencadis.kv.objects import BlockObjects
from trencadis.kv.parts import CHUNK_BYTES, StoreParts
from trencadis.kv.staging import Staging, runs
from trencadis.kv.threads import StoreThreads
from trencadis.records import TransferCause

__all__ = ["Batch", "Saves"]


class Batch:
    """Consecutive blocks of one sequence that wait to be saved. A task for a thread.

    Args:
        hashes: Of the blocks.
        slots: Of the staging memory, where their bytes are.
        saves: Where it belongs.

    Attributes:
        hashes: As above.
        slots: As above.
        is_wanted: Always true: a save is never taken back.
    """

    is_wanted = True

    def __init__(self, hashes: Sequence[bytes], slots: Sequence[int], saves: Saves) -> None:
        self.hashes = hashes
        self.slots = slots
        self._saves = saves

    def run(self, client: StoreClient) -> None:
        """Write what the store has not got yet."""
        try:
            self._saves.write(client, self)
        except TransferError as error:
            self._failed(error)
        except Exception as error:
            self._failed(TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED))
        finally:
            self.end()

    def end(self) -> None:
        """Give the memory back."""
        self._saves.staging.give_back(self.slots)

    def _failed(self, error: TransferError) -> None:
        parts = self._saves.parts
        parts.recent.discard(self.hashes)
        parts.failed(error, "save")
        parts.counters.dropped(error.cause, len(self.hashes))


class Saves:
    """All saves of one rank. Methods run on the backend's thread unless they say otherwise.

    Args:
        parts: Of the connector.
        pool: The device's blocks.
        objects: Packs them.
        staging: The memory they may take.

    Attributes:
        parts: As above.
        staging: As above.
    """

    def __init__(self, parts: StoreParts, pool: KVPool, objects: BlockObjects, staging: Staging) -> None:
        self.parts = parts
        self.staging = staging
        self._pool = pool
        self._objects = objects
        # A batch is dropped whole: none is so large that it takes the place of all others.
        staging.open(objects.block_bytes)
        self._chunk = max(1, min(CHUNK_BYTES // objects.block_bytes, staging.num_slots // 4))
        self._threads: StoreThreads[Batch] = StoreThreads(
            "trencadis-kv-save", parts.settings.num_save_threads, make_client=parts.client, activity=parts.activity
        )

    def stage(self, order: SaveOrder) -> None:
        """Copy blocks out, and queue them; a store that is too slow loses the oldest."""
        for start in range(0, len(order.blocks), self._chunk):
            blocks, hashes = order.blocks[start : start + self._chunk], order.hashes[start : start + self._chunk]
            slots = self._make_room(len(blocks))
            if not slots:
                self._drop(hashes, "staging")
                continue
            batch = Batch(hashes, slots, self)
            try:
                for index, first, last in runs(slots):
                    self._pool.read_blocks(blocks[index : index + last - first], self.staging.rows(first, last))
            except Exception as error:
                batch.end()
                self.parts.failed(TransferError(str(error), cause=TransferCause.RAISED), "save")
                self._drop(hashes, TransferCause.RAISED)
                continue
            if not self._threads.put(batch):
                batch.end()

    def write(self, client: StoreClient, batch: Batch) -> None:
        """Write blocks that the store has not got. From a thread of ours.

        Raises:
            TransferError: It could not be done.
        """
        parts, objects = self.parts, self._objects
        if not parts.breaker.allows:
            raise TransferError("The store is left alone.", cause=TransferCause.CANCELLED)
        hashes = batch.hashes
        keys = objects.keys(hashes)
        num_there = min(max(client.call(lambda store: store.contains(keys)), 0), len(keys))
        packed = [
            objects.pack(block_hash, memoryview(self.staging.rows(slot, slot + 1)[0]))
            for block_hash, slot in zip(hashes[num_there:], batch.slots[num_there:], strict=True)
        ]
        if not packed:
            return
        num_kept = client.call(lambda store: store.put(keys[num_there:], packed))
        if num_kept < len(packed):
            parts.counters.failed(TransferCause.FULL)
            self._drop(hashes[num_there:], TransferCause.FULL, num_blocks=len(packed) - num_kept)
        num_bytes = sum(piece.nbytes for pieces in packed[:num_kept] for piece in pieces)
        parts.counters.moved("save", num_tokens=num_kept * objects.block_size, num_bytes=num_bytes)

    def close(self, timeout_s: float) -> None:
        """Write what is staged, as far as time allows, and stop.

        Args:
            timeout_s: Seconds of real time, for either.
        """
        if self.parts.breaker.allows:
            self._threads.drain(timeout_s)
        while (batch := self._threads.take_oldest()) is not None:
            self._drop(batch.hashes, "closed")
            batch.end()
        self._threads.close(timeout_s)

    def _make_room(self, number: int) -> list[int]:
        """Return slots, at the cost of batches that wait; none if what is being written has them."""
        while not (slots := self.staging.take(number)):
            oldest = self._threads.take_oldest()
            if oldest is None:
                return []
            self._drop(oldest.hashes, "staging")
            oldest.end()
        return slots

    def _drop(self, hashes: Sequence[bytes], reason: str, *, num_blocks: int | None = None) -> None:
        self.parts.recent.discard(hashes)
        self.parts.counters.dropped(reason, len(hashes) if num_blocks is None else num_blocks)
