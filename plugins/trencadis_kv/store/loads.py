"""Loads on threads: bytes are received in host memory, verified, and then copied to the device.

    order ─▶ queue ─▶ thread: get ▶ verify ─┬─ host memory, no codec ───────────▶ write_blocks ─▶ finished ─▶ poll
                                            └─ decode ─┬─ any_thread ─────────▶ write_blocks ─▶ finished ─▶ poll
                                                       └─ else ─▶ arrived ─▶ poll: write_blocks

A store writes to buffers that no block shares, so a load that was cancelled is released at once: whatever still comes, comes to the
buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

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
from trencadis_kv.store.threads import StoreThreads

__all__ = ["Load", "Loads"]


class Load:
    """One load in flight. A task for a thread.

    Args:
        order: What to load.
        loads: Where it belongs.

    Attributes:
        transfer_id: Of the order.
        num_valid_blocks: Leading blocks that are verified and in place.
        error: Why it ended early, or None.
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


class Loads:
    """All loads of one rank. Methods run on the backend's thread unless stated otherwise.

    Args:
        parts: Of the connector.
        pool: The device's blocks.
        objects: Unpacks them.

    Attributes:
        parts: As above.
        pool: As above.
        block_size: Tokens of a block.
        chunk: Blocks of one call of the store.
        arrived: Verified blocks that wait for the backend's thread.
        finished: Loads that ended and were not reported yet.
    """

    def __init__(self, parts: StoreParts, pool: KVPool, objects: BlockObjects) -> None:
        self.parts = parts
        self.pool = pool
        self.block_size = objects.block_size
        most = CHUNK_BYTES if pool.any_thread else min(CHUNK_BYTES, parts.settings.max_load_bytes_per_step)
        self.chunk = max(1, most // objects.block_bytes)
        self.arrived: deque[tuple[Load, Sequence[int], NDArray[np.uint8]]] = deque()
        self.finished: deque[Load] = deque()
        self._objects = objects
        parts.pace.is_needed = is_on_host(pool)
        # A device may take many small blocks at once more quickly; host memory takes each from where it came.
        self._in_place = objects.is_plain and is_on_host(pool)
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
        # A call that began just when it was interrupted would block its thread: so once more.
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
                num_tokens = load.num_valid_blocks * self._objects.block_size
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
            client: Of the thread.
            hashes: Of the blocks, at most ``chunk``.

        Returns:
            Blocks up to the first that is missing or broken, ``[n, block_bytes]``, in memory of the thread that the next call writes to;
            and why not all.

        Raises:
            TransferError: The store did not answer.
        """
        parts, objects, (raw, decoded) = self.parts, self._objects, self._memory()
        keys, targets = objects.keys(hashes), [memoryview(raw[i]) for i in range(len(hashes))]
        since_s = parts.clock.now_s()
        try:
            sizes = client.call(lambda store: store.get(keys, targets))
        except TransferError:
            parts.cost.gave_up(num_bytes=len(keys) * objects.block_bytes, seconds=parts.clock.now_s() - since_s)
            raise
        if len(sizes) != len(keys):
            raise TransferError(f"{len(sizes)} answers to {len(keys)} keys.", cause=TransferCause.RAISED)
        num_good, error = 0, None
        for i, (block_hash, size) in enumerate(zip(hashes, sizes, strict=True)):
            error = self._unpacked(block_hash, targets[i], size, None if self._in_place else memoryview(decoded[i]))
            if error is not None:
                self._disown(client, hashes[i:], keys[i], error)
                break
            num_good += 1
        num_bytes = sum(sizes[:num_good])
        if num_good:
            # Bytes of blocks, as predictions are asked for: how far they shrink on the way is part of what was measured.
            parts.cost.loaded(num_bytes=num_good * objects.block_bytes, seconds=parts.clock.now_s() - since_s)
            parts.counters.moved("load", num_tokens=num_good * objects.block_size, num_bytes=num_bytes)
        return decoded[:num_good], error

    def _memory(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the calling thread's buffers for objects and for decoded blocks, ``[chunk, ...]``.

        Where nothing is decoded, the blocks are columns of the objects.
        """
        if not hasattr(self._buffers, "memory"):
            objects = self._objects
            raw = np.empty((self.chunk, objects.max_bytes), np.uint8)
            decoded = np.empty((self.chunk, objects.block_bytes), np.uint8)
            if self._in_place:
                decoded = raw[:, HEADER_BYTES : HEADER_BYTES + objects.block_bytes]
            self._buffers.memory = raw, decoded
        memory: tuple[NDArray[np.uint8], NDArray[np.uint8]] = self._buffers.memory
        return memory

    def _unpacked(self, block_hash: bytes, raw: memoryview, size: int, out: memoryview | None) -> TransferError | None:
        if not 0 <= size <= len(raw):
            return TransferError("The KV object is not there any more.", cause=TransferCause.EVICTED)
        try:
            if out is None:
                payload = self._objects.payload(block_hash, raw[:size])
                if len(payload) != self._objects.block_bytes:
                    return TransferError(
                        f"The KV object is broken: {len(payload)} bytes of payload.", cause=TransferCause.CORRUPT
                    )
            else:
                self._objects.unpack(block_hash, raw[:size], out)
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
