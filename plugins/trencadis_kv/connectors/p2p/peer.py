"""Connection to an engine that holds blocks: pulls and verifies them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self

import numpy as np

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.streaming import LayerSink, Push
from trencadis_kv.connectors.p2p.transport import ReceiveBuffer
from trencadis_kv.store.format import HEADER_BYTES, unsealed, verify
from trencadis_kv.wire.handshake import Identity, greet
from trencadis_kv.wire.socket_buffers import set_buffer
from trencadis_kv.wire.stream import FrameStream
from trencadis_kv.wire.stream_messages import (
    Abort,
    Ack,
    Commit,
    Layers,
    Placed,
    PrefillRequest,
    PrefillResponse,
    Pull,
    Release,
    Renew,
    State,
    Status,
    Taken,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_THROTTLE", "PeerConnection", "Throttle"]

_NEXT_S: Final = 0.001
"""Seconds within which the next piece comes if it is being written; otherwise its producer is delayed."""


class Throttle(Protocol):
    """Throttle of a pull."""

    @property
    def gives_way(self) -> bool:
        """Whether the pull should leave the processors to the engine."""
        ...

    def due_s(self) -> float:
        """Return how long to rest now, seconds; called after blocks were received."""
        ...

    def rest(self, seconds: float) -> None:
        """Rest; may end sooner."""
        ...


class _NoThrottle:
    gives_way: Final = False

    def due_s(self) -> float:
        return 0.0

    def rest(self, seconds: float) -> None:
        pass


NO_THROTTLE: Final[Throttle] = _NoThrottle()
"""Throttle that never rests."""


class PeerConnection:
    """One connection to a producer. One thread at a time; :meth:`cut` from any.

    Args:
        prefix: Location of the producer and of its blocks.
        me: Identity of this engine.
        connect_timeout_s: Longest time for the connection and for the handshake, seconds.

    Attributes:
        engine: Id of the producer.
        num_placed: Number of blocks taken from a receive buffer.

    Raises:
        TransferError: ``unreachable``, or an error of :func:`trencadis_kv.wire.handshake.greet`.
    """

    def __init__(self, prefix: RemotePrefix, me: Identity, *, connect_timeout_s: float) -> None:
        self._prefix = prefix
        self._me = me
        self._header = bytearray(HEADER_BYTES)
        self.num_placed = 0
        address = prefix.host, prefix.port
        try:
            connection = socket.create_connection(address, timeout=connect_timeout_s)
        except OSError as error:
            raise TransferError(
                f"No engine answers at {prefix.host}:{prefix.port}: {error}.", cause=TransferCause.UNREACHABLE
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_buffer(connection, "receive")
        self._stream = FrameStream(connection, timeout_s=connect_timeout_s)
        try:
            self.engine = greet(self._stream, me, wants=prefix.engine)
        except BaseException:
            self.close()
            raise

    def pull(
        self,
        hashes: Sequence[bytes],
        take: Callable[[int, NDArray[np.uint8]], None],
        *,
        num_rows: int,
        timeout_s: float,
        receive_buffer: ReceiveBuffer | None = None,
        by_layer: LayerSink | None = None,
        throttle: Throttle = NO_THROTTLE,
    ) -> None:
        """Pull blocks, in order.

        Args:
            hashes: Hashes of the blocks.
            take: Called with the index of a block and verified rows ``[1 .. num_rows, block_bytes]`` from there on, which are
                overwritten afterwards.
            num_rows: Maximum number of blocks per call of ``take``.
            timeout_s: Timeout of the whole pull, seconds.
            receive_buffer: Buffer that the producer may write blocks to, if it has the same transport.
            by_layer: Sink of single layers, if the producer can send them one after the other; ``take`` is not called
                then.
            throttle: Determines rests between two calls of ``take``.

        Raises:
            TransferError: Some blocks did not come; those taken are valid. ``lost``: not all blocks are held any more;
                ``corrupt``; or an error of :class:`FrameStream`.
        """
        self._stream.set_deadline(timeout_s)
        via, target = ("", b"") if receive_buffer is None else (receive_buffer.via, receive_buffer.target)
        ask = Pull(
            hold_id=self._prefix.hold_id, hashes=list(hashes), via=via, target=target, by_layer=by_layer is not None
        )
        self._stream.send(ask)
        answer = self._stream.receive()
        if by_layer is not None and isinstance(answer, Layers):
            self._pull_layers(hashes, by_layer, num_bytes=num_rows * self._me.block_bytes)
            return
        rows = np.empty((min(num_rows, max(1, len(hashes))), self._me.block_bytes), np.uint8)
        num_taken = num_pending = 0
        pieces = _Pieces(self._stream, 0 if receive_buffer is None else receive_buffer.num_pieces, throttle)
        try:
            while True:
                if receive_buffer is not None and isinstance(answer, Placed):
                    num_taken += self._take_placed(answer, receive_buffer, hashes[num_taken:], take, num_taken)
                    pieces.was_taken(answer.index, is_last=num_taken == len(hashes))
                elif isinstance(answer, int):
                    index = num_taken + num_pending
                    if index >= len(hashes):
                        raise TransferError("More blocks came than were asked for.", cause=TransferCause.CORRUPT)
                    self._receive_block(answer, rows[num_pending], hashes[index])
                    num_pending += 1
                    if num_pending == len(rows):
                        take(num_taken, rows)
                        num_taken, num_pending = num_taken + num_pending, 0
                        if due_s := throttle.due_s():
                            throttle.rest(due_s)
                else:
                    break
                answer = self._stream.receive()
        finally:
            # Verified blocks are used even if the next one is invalid.
            if num_pending:
                take(num_taken, rows[:num_pending])
        if receive_buffer is not None and isinstance(answer, (Commit, Abort)):
            receive_buffer.is_quiet = True
        self._check_end(answer, num_sent=num_taken + num_pending, num_wanted=len(hashes))

    def renew(self, *, timeout_s: float) -> bool:
        """Renew the lease of a hold; False if it is gone.

        Raises:
            TransferError: An error of :class:`FrameStream`.
        """
        self._stream.set_deadline(timeout_s)
        self._stream.send(Renew(hold_id=self._prefix.hold_id))
        return self._is_known()

    def release(self, *, timeout_s: float) -> bool:
        """Release a hold; False if it is gone.

        Raises:
            TransferError: An error of :class:`FrameStream`.
        """
        self._stream.set_deadline(timeout_s)
        self._stream.send(Release(hold_id=self._prefix.hold_id))
        return self._is_known()

    def ask_state(self, *, timeout_s: float) -> State:
        """Return the other engine's load.

        Raises:
            TransferError: An error of :class:`FrameStream`.
        """
        self._stream.set_deadline(timeout_s)
        self._stream.send(Status())
        answer = self._stream.receive()
        if not isinstance(answer, State):
            raise TransferError(f"{answer!r} came in the place of STATE.", cause=TransferCause.CORRUPT)
        return answer

    def request_prefill(self, message: PrefillRequest) -> PrefillResponse:
        """Request a prefill; returns when its blocks are held there.

        Raises:
            TransferError: The prefill failed: ``full`` or another cause at that engine; or an error of
                :class:`FrameStream`.
        """
        self._stream.set_deadline(message.timeout_s)
        self._stream.send(message)
        answer = self._stream.receive()
        if isinstance(answer, Abort):
            raise _given_up(answer)
        if (
            not isinstance(answer, PrefillResponse)
            or answer.num_tokens < 1
            or min(answer.num_pushed, answer.num_cached_tokens) < 0
        ):
            raise TransferError(f"{answer!r} came in the place of PREFILL_RESPONSE.", cause=TransferCause.CORRUPT)
        if answer.num_pushed * self._me.block_bytes > message.push_bytes:
            raise TransferError(
                f"{answer.num_pushed} blocks are sent along, and there is room for {message.push_bytes} bytes.",
                cause=TransferCause.CORRUPT,
            )
        return answer

    def receive_pushed(self, num_blocks: int, push: Push, *, timeout_s: float) -> None:
        """Receive and verify the blocks pushed after a prefill response.

        Args:
            num_blocks: Number of pushed blocks that the response announces.
            push: Receives the blocks.
            timeout_s: Timeout for all blocks, seconds.

        Raises:
            TransferError: Some blocks did not come; those counted are valid. ``corrupt``: other or more blocks came.
        """
        self._stream.set_deadline(timeout_s)
        for index in range(num_blocks):
            answer = self._stream.receive()
            if not isinstance(answer, int):
                self._check_end(answer, num_sent=index, num_wanted=num_blocks)
            else:
                self._receive_block(answer, push.row(index), push.hashes[index])
                push.came()
        self._check_end(self._stream.receive(), num_sent=num_blocks, num_wanted=num_blocks)

    def cut(self) -> None:
        """Shut the connection down: blocked calls raise. From any thread; may be called twice."""
        self._stream.cut()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pull_layers(self, hashes: Sequence[bytes], sink: LayerSink, *, num_bytes: int) -> None:
        """Receive the layers of all blocks, in batches of so many bytes."""
        for layer in sink.layout.layers:
            size = sink.layout.layer_bytes(layer)
            rows = np.empty((max(1, min(len(hashes), num_bytes // size)), size), np.uint8)
            for first in range(0, len(hashes), len(rows)):
                part = hashes[first : first + len(rows)]
                for row, block_hash in zip(rows, part, strict=False):
                    answer = self._stream.receive()
                    if not isinstance(answer, int):
                        self._check_end(answer, num_sent=0, num_wanted=len(hashes))
                        return
                    self._receive_block(answer, row, block_hash, layer)
                sink.take(layer, first, rows[: len(part)])
        self._check_end(self._stream.receive(), num_sent=len(hashes), num_wanted=len(hashes))

    def _take_placed(
        self,
        placed: Placed,
        receive_buffer: ReceiveBuffer,
        hashes: Sequence[bytes],
        take: Callable[[int, NDArray[np.uint8]], None],
        first: int,
    ) -> int:
        """Verify and take the blocks in a piece of the receive buffer, up to the first invalid one; returns how many."""
        num_placed = len(placed.headers)
        if not 0 < num_placed <= len(hashes) or not receive_buffer.holds(placed.index, num_placed):
            raise TransferError(f"{num_placed} blocks were placed that nobody asked for.", cause=TransferCause.CORRUPT)
        rows = receive_buffer.rows(placed.index)[:num_placed]
        num_good = 0
        try:
            for header, row, block_hash in zip(placed.headers, rows, hashes, strict=False):
                verify(header, row.data, compat=self._me.compat, block_hash=block_hash, codec_flags=0)
                num_good += 1
        finally:
            if num_good:
                take(first, rows[:num_good])
                self.num_placed += num_good
        return num_good

    def _receive_block(
        self, num_bytes: int, row: NDArray[np.uint8], block_hash: bytes, layer: int | None = None
    ) -> None:
        header, codec = self._header, self._me.codec
        if codec.flags:
            payload = memoryview(bytearray(row.nbytes + codec.max_growth_bytes))[: max(0, num_bytes - HEADER_BYTES)]
        else:
            payload = row.data
        if num_bytes != HEADER_BYTES + payload.nbytes:
            raise TransferError(f"A block of {num_bytes} bytes came.", cause=TransferCause.CORRUPT)
        self._stream.receive_block(memoryview(header), payload)
        verify(header, payload, compat=self._me.compat, block_hash=block_hash, codec_flags=codec.flags, layer=layer)
        if codec.flags:
            codec.decode(payload, unsealed(bytes(header)), row.data)

    def _check_end(self, answer: object, *, num_sent: int, num_wanted: int) -> None:
        match answer:
            case Commit() if answer.num_blocks == num_sent == num_wanted:
                return
            case Commit() if answer.num_blocks == num_sent:
                raise TransferError(
                    f"The other engine holds {num_sent} of {num_wanted} blocks.", cause=TransferCause.LOST
                )
            case Abort():
                raise _given_up(answer)
            case _:
                raise TransferError(f"{num_sent} blocks came, then {answer!r}.", cause=TransferCause.CORRUPT)

    def _is_known(self) -> bool:
        answer = self._stream.receive()
        if not isinstance(answer, Ack):
            raise TransferError(f"{answer!r} came in the place of ACK.", cause=TransferCause.CORRUPT)
        return answer.known


class _Pieces:
    """Returns pieces of a receive buffer to the producer: at once, or one at a time after a rest if the pull is throttled.

    When throttled, only one end works at a time, and a piece is read while it is still in the processors' caches.

    Args:
        stream: Stream to the producer.
        num_pieces: Number of pieces; the producer has all of them at first.
        throttle: Throttle of the pull.
    """

    def __init__(self, stream: FrameStream, num_pieces: int, throttle: Throttle) -> None:
        self._stream = stream
        self._num_pieces = num_pieces
        self._throttle = throttle
        self._kept: list[int] = []
        self._due_s = 0.0

    def was_taken(self, index: int, *, is_last: bool) -> None:
        """Return a piece, or keep it for now.

        Args:
            index: Index of the piece.
            is_last: Whether this is the last piece.
        """
        self._kept.append(index)
        self._due_s = 0.0 if is_last else self._due_s or self._throttle.due_s()
        is_alone = is_last or not (self._due_s or self._throttle.gives_way)
        # A producer that has nothing to write waits for all pieces.
        while self._kept and (is_alone or len(self._kept) == self._num_pieces or not self._stream.has_more(_NEXT_S)):
            if self._due_s:
                self._throttle.rest(self._due_s)
                self._due_s = 0.0
            self._stream.send(Taken(index=self._kept.pop(0)))


def _given_up(answer: Abort) -> TransferError:
    cause = TransferCause(answer.cause) if answer.cause in list(TransferCause) else TransferCause.UNREACHABLE
    return TransferError(f"The other engine gave up: {answer.reason}", cause=cause)
