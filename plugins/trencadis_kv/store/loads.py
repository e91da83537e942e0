"""Loads on threads: bytes are received in host memory, verified, and then copied to the device.

    order ─▶ queue ─▶ thread: get ▶ verify ─┬─ host memory, no codec ───────────▶ write_blocks ─▶ finished ─▶ poll
                                            └─ decode ─┬─ any_thread ─────────▶ write_blocks ─▶ finished ─▶ poll
                                                       └─ else ─▶ arrived ─▶ poll: write_blocks

A store writes to buffers that share no memory with blocks, so a cancelled load is released at once: late bytes only
reach the buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.records import ConnectorReport, FailedLoad, TransferCause
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.format import HEADER_BYTES
from trencadis_kv.store.messages import LoadOrder
from trencadis_kv.store.objects import BlockObjects
from trencadis_kv.store.parts import CHUNK_BYTES, StoreParts
from trencadis_kv.store.pool_access import is_on_host
from trencadis_kv.store.shards import RankShard
from trencadis_kv.store.threads import StoreThreads

__all__ = ["Load", "Loads"]


class Load:
    """One load in flight. A task for a thread.

    Args:
        order: Order to carry out.
        loads: Loads of the rank, to which this one belongs.

    Attributes:
        transfer_id: Transfer id of the order.
        num_valid_blocks: Leading blocks that are verified and in place.
        error: Reason why it ended early, or None.
    """

    def __init__(self, order: LoadOrder, loads: Loads) -> None:
        self._order = order
        self._loads = loads
        self._pace = loads.parts.pace.load(len(order.blocks) * loads.block_size, wait_s=order.wait_s)
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._was_cancelled = threading.Event()
        self._was_taken = threading.Event()
        self._was_taken.set()
        self.transfer_id = order.transfer_id
        self.num_valid_blocks = 0
        self.error: TransferError | None = None

    @property
    def is_wanted(self) -> bool:
        """False once it was cancelled."""
        return not self._is_cancelled

    def run(self, client: StoreClient) -> None:
        """Load, chunk by chunk, up to the first block that is missing or broken."""
        parts, loads = self._loads.parts, self._loads
        since_s, number = parts.clock.now_s(), len(self._order.blocks)
        self._pace.begin()
        try:
            if not parts.breaker.allows:
                raise TransferError("The store is left alone.", cause=TransferCause.UNREACHABLE)
            for start in range(0, number, loads.chunk):
                if not self.is_wanted or self.error is not None:
                    break
                self._run_chunk(client, start)
                self._was_cancelled.wait(self._pace.rest_s(min(1.0, (start + loads.chunk) / number)))
        except TransferError as error:
            self.error = error
        except Exception as error:
            self.error = TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED)
        self._pace.end()
        parts.counters.ended(parts.clock.now_s() - since_s)
        if self.error is not None and self.is_wanted:
            parts.failed(self.error, "load")
        loads.finished.append(self)

    def cancel(self) -> None:
        """Stop writing to its blocks; waits for a copy in progress."""
        self._is_cancelled = True  # before the lock, which the thread could take again and again
        self._was_cancelled.set()
        self._pace.end()
        with self._lock:
            self._go_on()

    def write(self, pool: KVPool, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy verified bytes to the device unless cancelled; rows that are not adjacent are copied one by one."""
        number = len(blocks) if data.flags.c_contiguous else 1
        for first in range(0, len(blocks), number):
            with self._lock:
                if self._is_cancelled:
                    return
                pool.write_blocks(blocks[first : first + number], data[first : first + number])
                self.num_valid_blocks += number

    def was_taken(self) -> None:
        """Resume the thread that waits for the backend's thread, if there is one."""
        with self._lock:
            self._go_on()

    def _go_on(self) -> None:
        if not self._was_taken.is_set():
            self._loads.parts.activity.begin()
            self._was_taken.set()

    def _run_chunk(self, client: StoreClient, start: int) -> None:
        order, loads = self._order, self._loads
        hashes = order.hashes[start : start + loads.chunk]
        data, self.error = loads.fetch(client, hashes)
        if not len(data):
            return
        blocks = order.blocks[start : start + len(data)]
        if loads.pool.any_thread:
            self.write(loads.pool, blocks, data)
        else:
            self._hand_over(blocks, data)

    def _hand_over(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Wait until the backend's thread has copied the bytes; the thread counts as idle meanwhile."""
        with self._lock:
            if self._is_cancelled:
                return
            self._was_taken.clear()
            self._loads.arrived.append((self, blocks, data))
            self._loads.parts.activity.end()
        self._was_taken.wait()


class _Memory(NamedTuple):
    """Buffers of one thread.

    Attributes:
        raw: Objects, one array for each shard, uint8 ``[chunk, max_bytes]``.
        decoded: Decoded payloads, one array for each shard, uint8 ``[chunk, bytes of the shard]``.
        blocks: Whole blocks, uint8 ``[chunk, block_bytes]``.
    """

    raw: Sequence[NDArray[np.uint8]]
    decoded: Sequence[NDArray[np.uint8]]
    blocks: NDArray[np.uint8]


class Loads:
    """All loads of one rank. Methods run on the backend's thread unless stated otherwise.

    Args:
        parts: Shared state of the connector.
        pool: KV blocks on the device.
        shards: Shards that make up each block of this rank.

    Attributes:
        parts: Shared state of the connector.
        pool: KV blocks on the device.
        block_size: Tokens per block.
        chunk: Blocks per call of the store.
        arrived: Verified blocks that wait for the backend's thread.
        finished: Loads that ended and were not reported yet.
    """

    def __init__(self, parts: StoreParts, pool: KVPool, shards: Sequence[RankShard]) -> None:
        self.parts = parts
        self.pool = pool
        self.block_size = pool.layout.block_size
        self._block_bytes = pool.layout.block_bytes
        most = CHUNK_BYTES if pool.any_thread else min(CHUNK_BYTES, parts.settings.max_load_bytes_per_step)
        self.chunk = max(1, most // self._block_bytes)
        self.arrived: deque[tuple[Load, Sequence[int], NDArray[np.uint8]]] = deque()
        self.finished: deque[Load] = deque()
        self._shards = shards
        parts.pace.is_needed = is_on_host(pool)
        # Host memory takes each block from its object; a device may take many small blocks at once more quickly.
        self._in_place = len(shards) == 1 and not shards[0].place and shards[0].objects.is_plain and is_on_host(pool)
        self._live: dict[int, Load] = {}
        self._cancelled: list[Load] = []
        self._released: list[int] = []
        self._buffers = threading.local()
        self._threads: StoreThreads[Load] = StoreThreads(
            "trencadis-kv-load",
            parts.settings.num_load_threads,
            make_client=parts.client,
            activity=parts.activity,
        )

    def start(self, order: LoadOrder) -> None:
        """Queue a load."""
        load = self._live[order.transfer_id] = Load(order, self)
        if not self._threads.put(load):
            load.error = TransferError("The connector is closed.", cause=TransferCause.CANCELLED)
            self.finished.append(load)

    def cancel(self, transfer_id: int) -> None:
        """Cancel a load; its transfer id is released with the next report."""
        load = self._live.pop(transfer_id, None)
        if load is not None:
            load.cancel()
            if not self._threads.take_back(load):
                self._cancelled.append(load)
                self._threads.interrupt_unwanted()
        self._released.append(transfer_id)

    def poll(self) -> ConnectorReport:
        """Copy received blocks to the device, and return the loads that ended."""
        self._write_arrived()
        # Interrupted once more: a call that began just after the first interrupt would block its thread.
        self._cancelled = [load for load in self._cancelled if self._threads.is_running(load)]
        if self._cancelled:
            self._threads.interrupt_unwanted()
        loaded: list[int] = []
        failed: list[FailedLoad] = []
        while self.finished:
            load = self.finished.popleft()
            if self._live.get(load.transfer_id) is not load:
                continue
            del self._live[load.transfer_id]
            if load.error is None:
                loaded.append(load.transfer_id)
            else:
                num_tokens = load.num_valid_blocks * self.block_size
                failed.append(
                    FailedLoad(transfer_id=load.transfer_id, num_valid_tokens=num_tokens, cause=str(load.error.cause))
                )
        released, self._released = self._released, []
        return ConnectorReport(loaded=tuple(loaded), failed=tuple(failed), released=tuple(released))

    def close(self, timeout_s: float) -> None:
        """Stop; no block is touched afterwards."""
        for load in self._live.values():
            load.cancel()
        self._live.clear()
        self._threads.close(timeout_s)

    def fetch(self, client: StoreClient, hashes: Sequence[bytes]) -> tuple[NDArray[np.uint8], TransferError | None]:
        """Get, verify and decode blocks. From a thread of this class.

        Args:
            client: Client of the calling thread.
            hashes: Hashes of the blocks, at most ``chunk``.

        Returns:
            Blocks up to the first that is missing or broken, uint8 ``[n, block_bytes]``, in memory of the thread that
            its next call overwrites; and the reason if not all are returned, else None.

        Raises:
            TransferError: The store did not answer.
        """
        parts, memory, since_s = self.parts, self._memory(), self.parts.clock.now_s()
        num_shards = len(self._shards)
        by_shard = [shard.objects.keys(hashes) for shard in self._shards]
        keys = [key for of_block in zip(*by_shard, strict=True) for key in of_block]
        targets = [memoryview(raw[i]) for i in range(len(hashes)) for raw in memory.raw]
        try:
            sizes = client.call(lambda store: store.get(keys, targets))
        except TransferError:
            parts.cost.gave_up(num_bytes=len(hashes) * self._block_bytes, seconds=parts.clock.now_s() - since_s)
            raise
        if len(sizes) != len(keys):
            raise TransferError(f"{len(sizes)} answers to {len(keys)} keys.", cause=TransferCause.RAISED)
        num_good, error = 0, None
        for place, (key, target, size) in enumerate(zip(keys, targets, sizes, strict=True)):
            i, which = divmod(place, num_shards)
            out = None if self._in_place else memoryview(memory.decoded[which][i])
            error = self._unpacked(self._shards[which].objects, hashes[i], target, size, out)
            if error is not None:
                self._disown(client, hashes[i:], key, error)
                break
            num_good = (place + 1) // num_shards
        if num_good:
            for shard, decoded in zip(self._shards, memory.decoded, strict=True):
                if shard.place is not None:
                    shard.place.write(decoded[:num_good], memory.blocks[:num_good])
            # Counted in bytes of blocks, as predictions are: compression by the codec is part of the measurement.
            parts.cost.loaded(num_bytes=num_good * self._block_bytes, seconds=parts.clock.now_s() - since_s)
            num_bytes = sum(sizes[: num_good * num_shards])
            parts.counters.moved("load", num_tokens=num_good * self.block_size, num_bytes=num_bytes)
        return memory.blocks[:num_good], error

    def _memory(self) -> _Memory:
        """Return the calling thread's buffers; if nothing is decoded, the blocks are views of the objects."""
        if not hasattr(self._buffers, "memory"):
            every = [shard.objects for shard in self._shards]
            raw = [np.empty((self.chunk, objects.max_bytes), np.uint8) for objects in every]
            if self._in_place:
                decoded = [raw[0][:, HEADER_BYTES : HEADER_BYTES + self._block_bytes]]
            else:
                decoded = [np.empty((self.chunk, objects.block_bytes), np.uint8) for objects in every]
            is_whole = len(every) == 1 and self._shards[0].place is None
            blocks = decoded[0] if is_whole else np.empty((self.chunk, self._block_bytes), np.uint8)
            self._buffers.memory = _Memory(raw, decoded, blocks)
        memory: _Memory = self._buffers.memory
        return memory

    def _unpacked(
        self, objects: BlockObjects, block_hash: bytes, raw: memoryview, size: int, out: memoryview | None
    ) -> TransferError | None:
        if not 0 <= size <= len(raw):
            return TransferError("The KV object is not there any more.", cause=TransferCause.EVICTED)
        try:
            if out is None:
                payload = objects.payload(block_hash, raw[:size])
                if len(payload) != objects.block_bytes:
                    return TransferError(
                        f"The KV object is broken: {len(payload)} bytes of payload.", cause=TransferCause.CORRUPT
                    )
            else:
                objects.unpack(block_hash, raw[:size], out)
        except TransferError as error:
            return error
        return None

    def _disown(self, client: StoreClient, hashes: Sequence[bytes], key: str, error: TransferError) -> None:
        """Record that the store does not have blocks, and delete a broken one so that it is saved again."""
        self.parts.recent.discard(hashes)
        if error.cause != TransferCause.CORRUPT or not self.parts.settings.saves:
            return
        try:
            client.call(lambda store: store.delete([key]))
        except TransferError as not_deleted:
            self.parts.failed(not_deleted, "delete")

    def _write_arrived(self) -> None:
        """Copy received blocks, at most a step's share; a chunk is never larger than that."""
        left = self.parts.settings.max_load_bytes_per_step
        is_first = True
        while self.arrived and (is_first or self.arrived[0][2].nbytes <= left):
            load, blocks, data = self.arrived.popleft()
            is_first = False
            left -= data.nbytes
            try:
                load.write(self.pool, blocks, data)
            except Exception as error:
                load.error = TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED)
            load.was_taken()
