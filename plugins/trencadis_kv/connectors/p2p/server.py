"""Server for other engines: sends held blocks and runs remote prefills; one thread to listen, one per connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from trencadis.errors import ConfigValueError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.p2p.metrics import P2PMetrics
from trencadis_kv.connectors.p2p.remote_prefills import Hold, Holds, RemotePrefill, RemotePrefills
from trencadis_kv.connectors.p2p.streaming import send_layers
from trencadis_kv.connectors.p2p.transport import Flight, Transport
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.format import HEADER_BYTES, for_block, seal_header, start_header
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.store.threads import let_others_first
from trencadis_kv.wire.handshake import Identity, accept
from trencadis_kv.wire.socket_buffers import set_buffer
from trencadis_kv.wire.stream import FrameStream, block_head
from trencadis_kv.wire.stream_messages import (
    Abort,
    Ack,
    Commit,
    Message,
    Placed,
    PrefillRequest,
    PrefillResponse,
    Pull,
    Refuse,
    Release,
    Renew,
    State,
    Status,
    Taken,
    encode_token,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BlockServer"]

logger = logging.getLogger("trencadis.kv.p2p")

_BATCH_BYTES: Final = 1 << 19
"""Bytes copied at once between pool and socket: enough that calls cost little, few enough that both ends work at the same time."""
_MIN_PIECE_BYTES: Final = 2048
"""Mean size below which pieces of blocks are copied together: each piece costs the system as much as copying so many bytes."""
_IDLE_S: Final = 10.0
_GLANCE_S: Final = 0.05
"""Interval at which the connection is checked while a prompt is computed."""
_MAX_REMOTE_PREFILL_S: Final = 600.0
_GRACE_S: Final = 1.0
"""Added to the caller's timeout: a caller that gives up closes the connection, one that vanished never does."""
_RATE_TOKENS: Final = 1000
_MAX_UNKNOWN: Final = 32
"""Most connections without a complete handshake; one more ends the oldest. They do not count as ``max_connections``."""
_PAUSE_S: Final = 0.5
"""Pause after a connection could not be accepted; it waits in the kernel meanwhile."""
_SILENCE_S: Final = 30.0
"""Least time between two log lines about refused connections."""


class BlockServer:
    """Listens for engines that pull.

    Args:
        config: Table of the connector: address, and limits of connections.
        holds: Blocks held for other engines.
        metrics: Counts sent blocks.
        remote_prefills: Prompts computed for other engines.
        cost: Estimates how quickly this engine computes tokens.
        transport: Transport of block bytes besides TCP, for engines that ask for it; None: TCP only.

    Attributes:
        port: Port that it listens on; 0 before :meth:`start`.
    """

    def __init__(
        self,
        config: P2PConfig,
        holds: Holds,
        metrics: P2PMetrics,
        *,
        remote_prefills: RemotePrefills,
        cost: CostModel,
        transport: Transport | None = None,
    ) -> None:
        self._config = config
        self._transport = transport
        self._remote_prefills = remote_prefills
        self._cost = cost
        self._holds = holds
        self._metrics = metrics
        self._listener: socket.socket | None = None
        self._threads: dict[threading.Thread, FrameStream] = {}
        self._known: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_failures = 0
        self._logged_s = float("-inf")
        self._identity: Identity | None = None
        self._find_pool: Callable[[], PoolAccess | None] = lambda: None
        self.port = 0

    def start(self, identity: Identity, pool: Callable[[], PoolAccess | None]) -> None:
        """Listen.

        Args:
            identity: Identity of this engine.
            pool: Returns access to the blocks on the device; None until the worker side has registered it.

        Raises:
            ConfigValueError: The address or the port cannot be listened on.
        """
        host, port = self._config.host, self._config.port
        table = "p2p" if self._transport is None else self._transport.name
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            raise ConfigValueError(
                f"kv_connector.{table}: cannot listen on {host}, port {port}: {error.strerror or error}.",
                hint=f"Choose another kv_connector.{table}.port, or 0 for any; the address must be one of this machine.",
            ) from error
        self._listener, self.port = listener, listener.getsockname()[1]
        self._identity, self._find_pool = identity, pool
        threading.Thread(target=self._listen, args=(listener,), name="trencadis-p2p-listen", daemon=True).start()
        logger.info("Engine %s offers KV blocks at %s, port %d.", identity.engine, host, self.port)

    def close(self) -> None:
        """Stop listening and cut every connection; returns when no block is read any more. May be called twice."""
        with self._lock:
            self._is_closed = True
            listener, self._listener = self._listener, None
            threads = dict(self._threads)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread, stream in threads.items():
            stream.cut()
            if thread is not threading.current_thread():
                thread.join()

    # ------------------------------------------------------------------------------------------------- innards

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                self._begin(connection)
            except (OSError, TransferError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if self._is_closed:
                    return
                self._log_refused(error)
                time.sleep(_PAUSE_S)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection on a thread of its own, or refuse it; it is closed if neither is possible."""
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_buffer(connection, "send")
            stream = FrameStream(connection, timeout_s=self._config.connect_timeout_s)
            thread = threading.Thread(target=self._serve, args=(stream,), name="trencadis-p2p-peer", daemon=True)
            with self._lock:
                has_room = len(self._known) < self._config.max_connections and not self._is_closed
                unknown = [other for one, other in self._threads.items() if one not in self._known]
                for other in unknown[: max(0, len(unknown) - _MAX_UNKNOWN + 1)]:
                    other.cut()
                if has_room:
                    thread.start()  # with the lock: close() joins the listed threads
                    self._threads[thread] = stream
            if has_room:
                undo.pop_all()
            else:
                _refuse(stream)

    def _log_refused(self, error: Exception) -> None:
        """Log that a connection could not be accepted: the first time, then at most twice a minute."""
        self._num_failures += 1
        if time.monotonic() < self._logged_s + _SILENCE_S:
            return
        self._logged_s = time.monotonic()
        logger.error(
            "A connection of another engine to port %d could not be accepted, %d so far: %s. The next is tried again; if this goes on, "
            "let the process open more files (ulimit -n, LimitNOFILE).",
            self.port,
            self._num_failures,
            error,
        )

    def _serve(self, stream: FrameStream) -> None:
        """Serve one connection to its end."""
        assert self._identity is not None, "it listens"
        let_others_first()
        try:
            accept(stream, self._identity)
            with self._lock:
                self._known.add(threading.current_thread())
            while True:
                stream.set_deadline(_IDLE_S)
                self._answer(stream, stream.receive())
        except TransferError as error:
            logger.debug("A connection of another engine ended: %s", error)
        except Exception:
            logger.warning("A connection of another engine ended unexpectedly.", exc_info=True)
        finally:
            stream.close()
            with self._lock:
                self._known.discard(threading.current_thread())
                self._threads.pop(threading.current_thread(), None)

    def _answer(self, stream: FrameStream, message: Message | int) -> None:
        match message:
            case Pull():
                self._send(stream, message)
            case Renew():
                stream.send(Ack(known=self._holds.renew(message.hold_id)))
            case Release():
                stream.send(Ack(known=self._holds.release(message.hold_id)))
            case Status():
                stream.send(self._state())
            case PrefillRequest():
                self._serve_prefill(stream, message)
            case _:
                raise TransferError(f"It sent {message!r}, which asks for nothing.", cause=TransferCause.CORRUPT)

    def _state(self) -> State:
        seconds, remote_prefills = self._cost.compute_s(_RATE_TOKENS), self._remote_prefills
        return State(
            accepts=remote_prefills.accepts,
            num_remote_prefills=remote_prefills.num_remote_prefills,
            num_tokens=remote_prefills.num_tokens,
            tokens_per_s=_RATE_TOKENS / seconds if seconds > 0 else 0.0,  # 0 for nan, too
        )

    def _serve_prefill(self, stream: FrameStream, message: PrefillRequest) -> None:
        """Run a remote prefill; it ends early if the other engine disconnects or the time is over."""
        try:
            prefill = self._remote_prefills.enter(message)
        except TransferError as error:
            stream.send(Abort(cause=error.cause, reason=str(error)))
            return
        until_s = time.monotonic() + min(message.timeout_s, _MAX_REMOTE_PREFILL_S) + _GRACE_S
        is_served = False
        try:
            while not prefill.wait(_GLANCE_S):
                if stream.is_gone or time.monotonic() > until_s:
                    return
            if stream.is_gone:
                return
            with contextlib.ExitStack() as stack:
                hold, hashes = self._to_push(stream, prefill, message, stack)
                stream.set_deadline(self._config.connect_timeout_s)
                stream.send(_answer_of(prefill, num_pushed=len(hashes)))
                is_served = True
                if hold is not None:
                    self._push(stream, hold, hashes)
        finally:
            if not is_served:
                self._remote_prefills.withdraw(prefill)
                stream.cut()

    def _to_push(
        self, stream: FrameStream, prefill: RemotePrefill, message: PrefillRequest, stack: contextlib.ExitStack
    ) -> tuple[Hold | None, list[bytes]]:
        """Return the blocks to push after a prefill response: those that the other engine lacks, at most ``push_bytes``."""
        pool, prefix = self._find_pool(), prefill.prefix
        if pool is None or prefix is None or not self._config.push:
            return None, []
        num_blocks = message.push_bytes // pool.layout.block_bytes
        if num_blocks < 1 or message.num_skipped < 0:
            return None, []
        try:
            hold = self._holds.open(prefix.hold_id, stream.cut)
        except TransferError as error:
            logger.debug("A prompt's blocks are gone before they could be sent: %s", error)
            return None, []
        stack.callback(self._holds.close, hold, stream.cut)
        hashes = list(hold.index)[message.num_skipped :][:num_blocks]
        return (hold, hashes) if hashes else (None, [])

    def _push(self, stream: FrameStream, hold: Hold, hashes: list[bytes]) -> None:
        """Push blocks; a consumer without room closes the connection."""
        pool = self._find_pool()
        assert pool is not None, "it was there when the response was made"
        stream.set_deadline(self._config.pull_timeout_s)
        self._send_blocks(stream, pool, hold, hashes)
        stream.send(Commit(num_blocks=len(hashes)))
        self._metrics.pushed("sent", num_bytes=len(hashes) * pool.layout.block_bytes)

    def _send(self, stream: FrameStream, pull: Pull) -> None:
        stream.set_deadline(self._config.pull_timeout_s)
        pool = self._find_pool()
        try:
            hold = self._holds.open(pull.hold_id, stream.cut)
        except TransferError as error:
            stream.send(Abort(cause=error.cause, reason=str(error)))
            return
        try:
            if pool is None:
                stream.send(Abort(cause=TransferCause.LOST, reason="this engine has no KV cache yet"))
                return
            hashes = list(takewhile(hold.index.__contains__, pull.hashes))
            by_layer = pull.by_layer and pool.layerwise and pool.any_thread
            flight = None if by_layer else self._flight(pull)
            if by_layer:
                if len(hashes) < len(pull.hashes):
                    reason = f"{len(hashes)} of {len(pull.hashes)} blocks are held"
                    stream.send(Abort(cause=TransferCause.LOST, reason=reason))
                    return
                self._send_layers(stream, pool, hold, hashes)
            elif flight is None:
                self._send_blocks(stream, pool, hold, hashes)
            else:
                with flight:
                    self._place_blocks(stream, pool, hold, hashes, flight)
            stream.send(Commit(num_blocks=len(hashes)))
        finally:
            self._holds.close(hold, stream.cut)

    def _flight(self, pull: Pull) -> Flight | None:
        assert self._identity is not None, "it listens"
        if self._transport is None or pull.via != self._transport.name or self._identity.codec.flags:
            return None  # encoded blocks have no fixed size, and go over the TCP connection
        return self._transport.flight(pull.target)

    def _place_blocks(
        self, stream: FrameStream, pool: PoolAccess, hold: Hold, hashes: list[bytes], flight: Flight
    ) -> None:
        """Write blocks to the other engine's memory, piece by piece, as pieces are returned."""
        assert self._identity is not None, "it listens"
        layout, timeout_s = pool.layout, self._config.pull_timeout_s
        draft = start_header(layout, compat=self._identity.compat, block_hash=bytes(32))
        free, lent, most = list(range(flight.num_pieces)), set[int](), len(flight.rows(0))
        if not pool.any_thread:
            most = min(most, max(1, self._config.max_bytes_per_step // layout.block_bytes))
        for first in range(0, len(hashes), most):
            part = hashes[first : first + most]
            if not free:
                free.append(_taken(stream.receive(), lent))
            piece = free.pop(0)
            rows = flight.rows(piece)[: len(part)]
            pool.read([hold.index[one] for one in part], rows, timeout_s=timeout_s)
            headers = [seal_header(for_block(draft, one), row.data) for one, row in zip(part, rows, strict=True)]
            flight.write(piece, len(part), timeout_s=timeout_s, is_gone=lambda: stream.is_gone)
            stream.send(Placed(index=piece, headers=[bytes(header) for header in headers]))
            lent.add(piece)
            num_bytes = len(part) * (layout.block_bytes + HEADER_BYTES)
            self._metrics.moved("send", num_tokens=len(part) * layout.block_size, num_bytes=num_bytes)
        while lent:
            _taken(stream.receive(), lent)

    def _send_layers(self, stream: FrameStream, pool: PoolAccess, hold: Hold, hashes: list[bytes]) -> None:
        assert self._identity is not None, "it listens"
        timeout_s = self._config.pull_timeout_s
        num_bytes = send_layers(stream, pool, self._identity, hold.index, hashes, timeout_s=timeout_s)
        self._metrics.moved("send", num_tokens=len(hashes) * pool.layout.block_size, num_bytes=num_bytes)

    def _send_blocks(self, stream: FrameStream, pool: PoolAccess, hold: Hold, hashes: list[bytes]) -> None:
        assert self._identity is not None, "it listens"
        layout, codec = pool.layout, self._identity.codec
        draft = start_header(layout, compat=self._identity.compat, block_hash=bytes(32), codec_flags=codec.flags)
        most_bytes = _BATCH_BYTES if pool.any_thread else self._config.max_bytes_per_step
        num_rows = max(1, min(len(hashes), most_bytes // layout.block_bytes))
        rows = np.empty((num_rows, layout.block_bytes), np.uint8)
        for first in range(0, len(hashes), num_rows):
            part = hashes[first : first + num_rows]
            payloads = self._payloads(pool, [hold.index[one] for one in part], rows[: len(part)])
            pieces: list[bytes | bytearray | memoryview] = []
            num_bytes = 0
            for block_hash, payload in zip(part, payloads, strict=True):
                own = for_block(draft, block_hash)
                sent = [memoryview(codec.encode(payload[0], own)).cast("B")] if codec.flags else payload
                size = sum(one.nbytes for one in sent)
                pieces += (block_head(seal_header(own, sent), size), *sent)
                num_bytes += HEADER_BYTES + size
            stream.send_pieces(pieces)
            self._metrics.moved("send", num_tokens=len(part) * layout.block_size, num_bytes=num_bytes)

    def _payloads(self, pool: PoolAccess, blocks: list[int], rows: NDArray[np.uint8]) -> Sequence[Sequence[memoryview]]:
        """Return the bytes of blocks: views if these have few pieces, else a copy."""
        layout = pool.layout
        assert self._identity is not None, "it listens"
        if not self._identity.codec.flags and layout.block_bytes >= _MIN_PIECE_BYTES * len(layout.parts):
            views = pool.view(blocks)
            if views is not None:
                return views
        pool.read(blocks, rows, timeout_s=self._config.pull_timeout_s)
        return [[row.data] for row in rows]


def _taken(message: object, lent: set[int]) -> int:
    if not isinstance(message, Taken) or message.index not in lent:
        raise TransferError(f"{message!r} came in the place of TAKEN.", cause=TransferCause.CORRUPT)
    lent.remove(message.index)
    return message.index


def _answer_of(prefill: RemotePrefill, *, num_pushed: int = 0) -> PrefillResponse | Abort:
    prefix = prefill.prefix
    if prefix is None:
        return Abort(cause=TransferCause.FULL, reason=prefill.error)
    return PrefillResponse(
        hold_id=prefix.hold_id,
        num_tokens=prefix.num_tokens,
        lease_s=prefix.lease_s,
        token=None if prefill.first is None else encode_token(prefill.first),
        num_pushed=num_pushed,
        num_cached_tokens=prefix.num_cached_tokens,
    )


def _refuse(stream: FrameStream) -> None:
    """Refuse a connection without blocking."""
    try:
        stream.send(Refuse(cause=TransferCause.UNREACHABLE, reason="it serves as many engines as it may"))
    except TransferError as error:
        logger.debug("A connection that was one too many ended: %s", error)
    finally:
        stream.close()
