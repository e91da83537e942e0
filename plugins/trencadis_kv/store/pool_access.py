"""Access to a KV pool from a connector's threads, for devices that require their own thread as well.

If the pool may be used from any thread, a copy happens at once. Otherwise it waits until the backend's thread calls
:meth:`PoolAccess.serve`, once a step, which copies a limited number of bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.records import TransferCause

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PoolAccess", "is_on_host"]


def is_on_host(pool: KVPool) -> bool:
    """Return whether blocks are in host memory, so that steps are computed on the CPU. Pure."""
    return pool.any_thread and pool.view_blocks([]) is not None


class PoolAccess:
    """Reads and writes blocks from any thread; none after :meth:`close`.

    Args:
        pool: KV pool of one rank.

    Attributes:
        layout: KV layout of the pool.
        any_thread: Whether copies happen at once, on the calling thread.
        layerwise: Whether single layers can be copied.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._jobs: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self.layout = pool.layout
        self.any_thread = pool.any_thread
        self.layerwise = pool.layerwise

    def read(self, blocks: Sequence[int], out: NDArray[np.uint8], *, timeout_s: float) -> None:
        """Copy blocks to host memory.

        Args:
            blocks: Ids of the blocks, ``[n]``.
            out: Destination, uint8 ``[n, block_bytes]``, C order.
            timeout_s: Longest wait for the backend's thread, seconds.

        Raises:
            TransferError: ``deadline``, or ``cancelled`` because of :meth:`close`; ``out`` is not written to any more.
        """
        self._do(lambda: self._pool.read_blocks(blocks, out), out.nbytes, timeout_s)

    def view(self, blocks: Sequence[int]) -> Sequence[Sequence[memoryview]] | None:
        """Return views of blocks in host memory, by block and piece, or None if they must be copied.

        :meth:`close` does not wait for readers of the views, so they must have ended before the pool is freed.

        Args:
            blocks: Ids of the blocks, ``[n]``.

        Raises:
            TransferError: ``cancelled`` because of :meth:`close`.
        """
        with self._lock:
            if self._is_closed:
                raise _closed()
            return self._pool.view_blocks(blocks) if self.any_thread else None

    def write(self, blocks: Sequence[int], data: NDArray[np.uint8], *, timeout_s: float) -> None:
        """Copy blocks from host memory.

        Args:
            blocks: Ids of the blocks, ``[n]``, none twice.
            data: Source, uint8 ``[n, block_bytes]``, C order.
            timeout_s: Longest wait for the backend's thread, seconds.

        Raises:
            TransferError: ``deadline``, or ``cancelled`` because of :meth:`close`; no block is written to any more.
        """
        self._do(lambda: self._pool.write_blocks(blocks, data), data.nbytes, timeout_s)

    def read_layer(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8], *, timeout_s: float) -> None:
        """Copy one layer of blocks to host memory; as :meth:`read`, with ``out`` see ``KVPool.read_layer``."""
        self._do(lambda: self._pool.read_layer(layer, blocks, out), out.nbytes, timeout_s)

    def write_layer(self, layer: int, blocks: Sequence[int], data: NDArray[np.uint8], *, timeout_s: float) -> None:
        """Copy one layer of blocks from host memory; as :meth:`write`, with ``data`` see ``KVPool.write_layer``."""
        self._do(lambda: self._pool.write_layer(layer, blocks, data), data.nbytes, timeout_s)

    def serve(self, *, max_bytes: int) -> None:
        """Run queued copies, at least one and at most ``max_bytes``. On the backend's thread."""
        num_bytes = 0
        while self._jobs:
            with self._lock:
                if not self._jobs or (num_bytes and num_bytes + self._jobs[0].num_bytes > max_bytes):
                    return
                job = self._jobs.popleft()
                num_bytes += job.num_bytes
                job.run()

    def close(self) -> None:
        """Refuse further access, and wait until running copies end."""
        with self._lock:
            self._is_closed = True
            while self._jobs:
                self._jobs.popleft().drop()

    def _do(self, copy: Callable[[], None], num_bytes: int, timeout_s: float) -> None:
        job = _Job(copy, num_bytes)
        with self._lock:
            if self._is_closed:
                raise _closed()
            if self.any_thread:
                copy()
                return
            self._jobs.append(job)
        if not job.done.wait(timeout_s):
            with self._lock:
                if job in self._jobs:
                    self._jobs.remove(job)
                    raise TransferError(
                        "The device's thread did not come to copy blocks.", cause=TransferCause.DEADLINE
                    )
        if job.error is not None:
            raise job.error


class _Job:
    def __init__(self, copy: Callable[[], None], num_bytes: int) -> None:
        self._copy = copy
        self.num_bytes = num_bytes
        self.done = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._copy()
        except Exception as error:
            self.error = error
        self.done.set()

    def drop(self) -> None:
        self.error = _closed()
        self.done.set()


def _closed() -> TransferError:
    return TransferError("The connector was closed.", cause=TransferCause.CANCELLED)
