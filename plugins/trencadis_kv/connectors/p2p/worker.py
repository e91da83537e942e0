"""Worker side of the connector between engines: pulls blocks on threads, and releases held ones."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec

from trencadis.errors import TransferError
from trencadis.interfaces import KVPool, KVWorkerSide
from trencadis.records import ConnectorReport, FailedLoad, TransferCause
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.streaming import Arrivals, LayerSink
from trencadis_kv.store.format import HEADER_BYTES
from trencadis_kv.store.pool_access import PoolAccess, is_on_host
from trencadis_kv.store.threads import let_others_first

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TAKEN_BYTES", "LoadOrder", "P2PWorker", "Work"]

logger = logging.getLogger("trencadis.kv.p2p")

TAKEN_BYTES: Final = 4 << 20
"""Bytes received over the connection that are copied to the pool at once: a reader that wakes the sender more often is
interrupted more often."""
_SLOW: Final = frozenset({TransferCause.DEADLINE, TransferCause.CANCELLED})
"""Causes that say that a pull was too slow; a cut connection or an invalid answer says nothing about the bandwidth."""


class LoadOrder(msgspec.Struct, array_like=True):
    """A prefix to pull, and its destination."""

    transfer_id: int
    engine: str
    name: str
    host: str
    port: int
    lease_s: float
    blocks: list[int]
    hashes: list[bytes]
    by_layer: bool = False


class Work(msgspec.Struct, array_like=True):
    """Message of one step."""

    loads: list[LoadOrder]
    cancels: list[int]


class P2PWorker(KVWorkerSide):
    """Pulls the blocks that the scheduler side orders.

    Args:
        node: State shared by both sides.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._threads = ThreadPoolExecutor(
            node.config.num_pull_threads, thread_name_prefix="trencadis-p2p-pull", initializer=let_others_first
        )
        self._decoder = msgspec.msgpack.Decoder(Work)
        self._pulls: dict[int, _Pull] = {}
        self._unknown: list[int] = []
        self._waited: list[_Pull] = []
        self._is_closed = False

    def register(self, kv_cache: KVPool) -> None:
        """Receive the KV pool."""
        self._node.pool = PoolAccess(kv_cache)
        self._node.pace.is_needed = is_on_host(kv_cache)

    def begin_step(self, message: bytes) -> None:
        """Start pulls, and cancel others."""
        if not message:
            return
        work = self._decoder.decode(message)
        for order in work.loads:
            pull = self._pulls[order.transfer_id] = _Pull(order, self._node)
            if pull.arrivals is not None:
                self._waited.append(pull)
            self._threads.submit(pull.run)
        for transfer_id in work.cancels:
            if transfer_id in self._pulls:
                self._pulls[transfer_id].cancel()
            else:
                self._unknown.append(transfer_id)  # it has ended, and its report is on its way

    @property
    def wants_layers(self) -> bool:
        """Whether layer-wise pulls began with this step."""
        return bool(self._waited)

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Wait until the layer-wise pulls have received a layer; give up those that have not."""
        until_s = time.monotonic() + budget_s
        late = [pull for pull in self._waited if not pull.has_layer(layer, until_s=until_s)]
        for pull in late:
            pull.give_up()
            self._waited.remove(pull)
        return not late

    def end_step(self) -> None:
        """Do nothing: no blocks are saved."""
        self._waited.clear()

    def poll(self) -> ConnectorReport:
        """Return which pulls and holds ended; copies blocks that only this thread may copy."""
        node = self._node
        if node.pool is not None and not self._is_closed:
            node.pool.serve(max_bytes=node.config.max_bytes_per_step)
        ended = [pull for pull in self._pulls.values() if pull.is_done]
        for pull in ended:
            del self._pulls[pull.order.transfer_id]
        for pull in self._pulls.values():
            pull.keep_alive()
        released = [*self._unknown, *[pull.order.transfer_id for pull in ended if pull.is_cancelled]]
        self._unknown.clear()
        return ConnectorReport(
            loaded=tuple([pull.order.transfer_id for pull in ended if pull.is_complete and not pull.is_cancelled]),
            failed=tuple([pull.failure() for pull in ended if not pull.is_complete and not pull.is_cancelled]),
            released=(*released, *node.holds.take_free()),
        )

    def close(self) -> None:
        """Cut all pulls and readers; may be called twice."""
        self._is_closed = True
        for pull in self._pulls.values():
            pull.cancel()
        if self._node.pool is not None:
            self._node.pool.close()
        self._node.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Pull:
    """One pull in flight."""

    def __init__(self, order: LoadOrder, node: Node) -> None:
        self.order = order
        self._node = node
        self._prefix = RemotePrefix(
            engine=order.engine,
            hold_id=order.name,
            host=order.host,
            port=order.port,
            num_tokens=0,
            lease_s=order.lease_s,
        )
        pool = node.pool
        self.arrivals = Arrivals(pool.layout.layers) if order.by_layer and pool is not None else None
        self._connection: PeerConnection | None = None
        self._push = node.pushes.take(order.name)
        self._pace = node.pace.load(len(order.hashes) * node.block_size, wait_s=node.config.pull_timeout_s)
        self._rested_s = 0.0
        self._was_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._num_taken = self._num_pushed = 0
        self._error: TransferError | None = None
        self._started_s = self._renewed_s = self._since_s = self._taken_s = time.monotonic()
        self._is_connected = False
        self._is_running = False
        self._is_given_up = False
        self.is_cancelled = False
        self._has_ended = False

    @property
    def is_done(self) -> bool:
        """Whether it writes to its blocks no more."""
        return self._has_ended or (self.arrivals is not None and self.arrivals.are_all_there)

    @property
    def is_complete(self) -> bool:
        return self._error is None if self.arrivals is None else self.arrivals.are_all_there

    def failure(self) -> FailedLoad:
        error = self._error or _late()  # the last layer came after the wait had ended
        pool = self._node.pool
        block_size = 0 if pool is None else pool.layout.block_size
        cause = f"{error.cause}: {error}"
        return FailedLoad(
            transfer_id=self.order.transfer_id, num_valid_tokens=self._num_taken * block_size, cause=cause
        )

    def keep_alive(self) -> None:
        """Renew the lease while the pull waits for a thread."""
        now_s = time.monotonic()
        if not self._is_running and now_s - self._renewed_s > self.order.lease_s / 3:
            self._renewed_s = now_s
            self._node.background_calls.renew(self._prefix)

    def cancel(self) -> None:
        self._was_cancelled.set()
        self._pace.end()
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                self._connection.cut()
        self._close_push()

    def has_layer(self, layer: int, *, until_s: float) -> bool:
        return self.arrivals is None or self.arrivals.wait(layer, until_s=until_s)

    def give_up(self) -> None:
        """Cut a pull that a step cannot wait for any longer."""
        with self._lock:
            self._is_given_up = True
            if self._connection is not None:
                self._connection.cut()

    @property
    def gives_way(self) -> bool:
        return self._pace.gives_way

    def due_s(self) -> float:
        """Return how long to rest now."""
        return self._pace.rest_s(self._num_taken / len(self.order.blocks))

    def rest(self, seconds: float) -> None:
        """Rest, unless it is cancelled."""
        since_s = time.monotonic()
        self._was_cancelled.wait(seconds)
        self._rested_s += time.monotonic() - since_s

    def run(self) -> None:
        """Pull, on a thread; sets :attr:`is_done` in every case, and touches nothing afterwards."""
        self._is_running = True
        try:
            self._pull()
        except TransferError as error:
            self._failed(error)
        except Exception as error:
            logger.warning("A pull failed unexpectedly.", exc_info=error)
            self._failed(TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED))
        finally:
            self._close_push()
            if self.arrivals is not None:
                self.arrivals.end(is_complete=self._error is None)
            self._pace.end()
            self._has_ended = True

    def _pull(self) -> None:
        node, pool = self._node, self._node.pool
        if pool is None or node.identity is None:
            raise TransferError("There is no KV cache yet.", cause=TransferCause.RAISED)
        identity, config = node.identity, node.config
        if self.is_cancelled:
            raise _cancelled()
        first = self._num_pushed = self._take_pushed(pool)
        if first == len(self.order.hashes):
            self._count()
            node.metrics.ended(time.monotonic() - self._started_s)
            node.background_calls.release(self._prefix)
            return
        with PeerConnection(self._prefix, identity, connect_timeout_s=config.connect_timeout_s) as connection:
            with self._lock:
                self._connection = connection
                if self.is_cancelled or self._is_given_up:
                    raise _cancelled()
            self._since_s = self._taken_s = time.monotonic()
            self._is_connected = True
            self._pace.begin()
            most_bytes = TAKEN_BYTES if pool.any_thread else config.max_bytes_per_step
            num_rows = max(1, most_bytes // identity.block_bytes)
            sink = None if self.arrivals is None else LayerSink(layout=pool.layout, take=self._take_layer)
            receive_buffer = None if node.transport is None or sink is not None else node.transport.receive_buffer()
            try:
                connection.pull(
                    self.order.hashes[first:],
                    lambda index, rows: self._take(first + index, rows),
                    num_rows=num_rows,
                    timeout_s=config.pull_timeout_s,
                    receive_buffer=receive_buffer,
                    by_layer=sink,
                    throttle=self,
                )
            finally:
                if receive_buffer is not None:
                    receive_buffer.close()
            self._count()
            node.metrics.ended(time.monotonic() - self._started_s)
            try:
                connection.release(timeout_s=config.connect_timeout_s)
            except TransferError as error:
                logger.debug("The blocks came, but could not be released: %s", error)
                node.background_calls.release(self._prefix)

    def _take_pushed(self, pool: PoolAccess) -> int:
        """Take pushed blocks as they arrive; returns how many leading ones of the order.

        Raises:
            TransferError: An error of :meth:`_take`, or the sender is too slow to be asked for the rest.
        """
        push, hashes = self._push, self.order.hashes
        if (
            push is None or hashes[0] not in push.hashes
        ):  # blocks that were cached here when the others were requested are gone
            return 0
        place, num_taken = push.hashes.index(hashes[0]), 0
        until_s = self._started_s + self._node.config.pull_timeout_s
        most = max(1, self._node.config.max_bytes_per_step // pool.layout.block_bytes)
        while num_taken < len(hashes):
            rows = push.wait(place + num_taken, until_s=until_s)[place + num_taken :]
            rows = rows[: min(most, len(hashes) - num_taken)]
            if not len(rows):
                break
            self._take(num_taken, rows)
            num_taken += len(rows)
            self.rest(self.due_s())
        self._close_push()
        if num_taken < len(hashes) and time.monotonic() >= until_s:
            raise TransferError("Blocks that were sent along took too long.", cause=TransferCause.DEADLINE)
        if push.error is not None and push.error.cause in _SLOW:
            raise push.error
        return num_taken

    def _close_push(self) -> None:
        if self._push is not None:
            self._push.close()

    def _take(self, first: int, rows: NDArray[np.uint8]) -> None:
        pool = self._node.pool
        if self.is_cancelled or pool is None:
            raise _cancelled()
        pool.write(self.order.blocks[first : first + len(rows)], rows, timeout_s=self._node.config.pull_timeout_s)
        self._num_taken, self._taken_s = first + len(rows), time.monotonic() - self._rested_s

    def _take_layer(self, layer: int, first: int, rows: NDArray[np.uint8]) -> None:
        pool, arrivals = self._node.pool, self.arrivals
        if self.is_cancelled or self._is_given_up or pool is None or arrivals is None:
            raise _cancelled()
        end = first + len(rows)
        blocks, timeout_s = self.order.blocks[first:end], self._node.config.pull_timeout_s
        pool.write_layer(layer, blocks, rows, timeout_s=timeout_s)
        if end == len(self.order.blocks):
            self._num_taken = end if layer == pool.layout.layers[-1] else 0
            arrivals.came(layer)

    def _count(self) -> None:
        """Record received bytes and the time they took, for an incomplete pull as well."""
        node, pool = self._node, self._node.pool
        if pool is None or not self._num_taken:
            return
        num_taken, layout = self._num_taken, pool.layout
        node.metrics.moved(
            "load",
            num_tokens=num_taken * layout.block_size,
            num_bytes=num_taken * (layout.block_bytes + HEADER_BYTES),
        )
        if num_taken > self._num_pushed:  # the time of pushed blocks was recorded when they were received
            num_bytes = (num_taken - self._num_pushed) * layout.block_bytes
            node.cost.loaded(num_bytes=num_bytes, seconds=self._taken_s - self._since_s)
            num_placed = 0 if self._connection is None else self._connection.num_placed * layout.block_bytes
            if node.transport is not None and num_placed:
                node.metrics.pulled(node.transport.name, num_bytes=num_placed)
            node.metrics.pulled("connection", num_bytes=num_bytes - num_placed)

    def _gave_up(self, cause: str) -> None:
        """Record how long the rest of a pull was awaited in vain; a cancelled one counts only if it outlasted computing."""
        pool, cost = self._node.pool, self._node.cost
        num_left = len(self.order.hashes) - self._num_taken
        if pool is None or not self._is_connected or cause not in _SLOW or num_left <= 0:
            return
        waited_s = time.monotonic() - self._rested_s - self._taken_s
        if cause == TransferCause.DEADLINE or waited_s > cost.compute_s(num_left * pool.layout.block_size):
            cost.gave_up(num_bytes=num_left * pool.layout.block_bytes, seconds=waited_s)

    def _failed(self, error: TransferError) -> None:
        if self.is_cancelled:
            error = _cancelled()
        elif self._is_given_up:
            error = _late()
        self._error = error
        self._count()
        self._gave_up(error.cause)
        self._node.metrics.failed(error.cause)
        if not self._is_given_up:  # an engine that is too slow is not unreachable
            self._node.peers.failed(self._prefix, error)
        # The producer need not hold the blocks to the end of the lease; if it cannot be reached, the lease expires by
        # itself.
        self._node.background_calls.release(self._prefix)


def _cancelled() -> TransferError:
    return TransferError("The load is not wanted any more.", cause=TransferCause.CANCELLED)


def _late() -> TransferError:
    return TransferError("A step could not wait longer for a layer.", cause=TransferCause.DEADLINE)
