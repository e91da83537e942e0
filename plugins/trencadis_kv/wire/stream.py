"""Protocol between two engines of which one pulls KV blocks from the other: messages, their order, and frames.

A frame is 8 bytes of head and a body; little endian: ``u32`` bytes of the body, ``u16`` kind, ``u16`` zero. The body of
a ``BLOCK`` is an object as in :mod:`trencadis_kv.store.format`: 128 bytes of header, and the payload. All other bodies
are msgpack. Another version is refused. TCP sets the pace: a slow reader slows its sender, and closing the connection
ends a transfer at once::

    consumer                                producer
    HELLO (version, compat, whom, nonce) ─▶
                                         ◀─ WELCOME (nonce, proof) | REFUSE (cause, reason)
    PROOF    PULL (hold_id, hashes)       ─▶
                                         ◀─ BLOCK … BLOCK  COMMIT (number) | ABORT (cause, reason)
    PULL (hold_id, hashes, via, target)   ─▶   the bytes go another way, if the producer has it, too
                                         ◀─ PLACED (piece, headers) …  COMMIT | ABORT
    TAKEN (piece)                        ─▶
    PULL (hold_id, hashes, by layer)      ─▶   the same bytes in another order, if the producer can
                                         ◀─ LAYERS  BLOCK … BLOCK, one layer after the other  COMMIT | ABORT
    RENEW (hold_id) | RELEASE (hold_id)    ─▶
                                         ◀─ ACK (known)
    STATUS                               ─▶
                                         ◀─ STATE (whether it takes prompts, load, rate)
    PREFILL_REQUEST (prompt, salt, …)             ─▶
                      (computes it)      ◀─ PREFILL_RESPONSE (hold_id, number of tokens) | ABORT (cause, reason)
    PREFILL_REQUEST (prompt, …, sampling, credit)    ─▶   the first token, and blocks that need not be pulled
                                         ◀─ PREFILL_RESPONSE (hold_id, …, token, number of blocks)  BLOCK … BLOCK  COMMIT (number) | ABORT

A consumer that closes the connection while its prompt is computed withdraws the request. Before both sides have proved
that they know the secret, a message has at most 4 KiB; after that, memory for a message grows as its bytes arrive,
whatever its head says.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.format import HEADER_BYTES
from trencadis_kv.wire.stream_messages import (
    BODIES,
    KINDS,
    Abort,
    Ack,
    Commit,
    Hello,
    Kind,
    Message,
    PrefillRequest,
    PrefillResponse,
    Proof,
    Pull,
    Refuse,
    Release,
    Renew,
    State,
    Status,
    Welcome,
)

__all__ = [
    "BLOCK_HEAD_BYTES",
    "Abort",
    "Ack",
    "Commit",
    "FrameStream",
    "Hello",
    "Kind",
    "Message",
    "PrefillRequest",
    "PrefillResponse",
    "Proof",
    "Pull",
    "Refuse",
    "Release",
    "Renew",
    "State",
    "Status",
    "VERSION",
    "Welcome",
    "block_head",
]

VERSION: Final = 1
"""Engines of different versions refuse each other."""

_HEAD: Final = struct.Struct("<IHH")
BLOCK_HEAD_BYTES: Final = _HEAD.size + HEADER_BYTES
"""Bytes in front of the payload of a ``BLOCK``."""

_MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest message; a prompt of a million tokens has 2 MiB of block hashes."""
_MAX_GREETING_BYTES: Final = 4096
"""Largest message before the other side is authenticated."""
_FIRST_BYTES: Final = 1 << 16
"""Memory allocated for a message before any of its bytes arrive; then it doubles as they arrive."""
_ARMED_RATIO: Final = 0.9
"""Share of the socket's time-out below which it is set anew: a call may overrun the deadline by a tenth, which saves
most calls a system call."""
_MAX_PIECES: Final = 512
"""Most buffers of one ``sendmsg``; POSIX promises 16, Linux takes 1024."""


def block_head(header: bytes, payload_bytes: int) -> bytes:
    """Return the bytes before the payload of a ``BLOCK``: the frame's head and the object's header. Pure."""
    return _HEAD.pack(HEADER_BYTES + payload_bytes, Kind.BLOCK, 0) + header


class FrameStream:
    """Frames over one connected socket. One thread at a time; :meth:`cut` from any.

    Every call ends by the deadline. Errors are ``TransferError`` with the causes ``deadline``, ``unreachable`` (the
    other side is gone) or ``corrupt`` (it does not speak this protocol); the connection is unusable after one.

    Args:
        connection: Connected stream socket, which the stream owns from now on.
        timeout_s: Time until the first deadline, seconds.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self._socket = connection
        self._head = bytearray(_HEAD.size)
        self._num_head_bytes = 0
        self._is_known = False
        self._deadline_s = self._armed_s = 0.0
        connection.settimeout(None)
        self.set_deadline(timeout_s)

    def set_deadline(self, timeout_s: float) -> None:
        """Set the deadline of all following calls, seconds from now, real time."""
        self._deadline_s = time.monotonic() + timeout_s
        self._arm(timeout_s)

    def trust(self) -> None:
        """Accept messages of every size: the other side is authenticated."""
        self._is_known = True

    def send(self, message: Message) -> None:
        """Send a message."""
        body = msgspec.msgpack.encode(message)
        self.send_pieces([_HEAD.pack(len(body), KINDS[type(message)], 0), body])

    def send_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send several buffers one after the other, without joining them.

        Args:
            pieces: Buffers to send; memory views must be of single bytes.
        """
        for first in range(0, len(pieces), _MAX_PIECES):
            left = pieces[first : first + _MAX_PIECES]
            while left:
                self._use_time_left()
                try:
                    num_bytes = self._socket.sendmsg(left)
                except OSError as error:
                    raise _broken(error) from error
                left = _behind(left, num_bytes)

    def receive(self) -> Message | int:
        """Return the next message; for a ``BLOCK`` the size of its body, for :meth:`receive_block`."""
        num_bytes, number = self._receive_head()
        if not self._is_known and num_bytes > _MAX_GREETING_BYTES:
            raise _not_ours(f"a first message of {num_bytes} bytes")
        if number == Kind.BLOCK:
            return num_bytes
        if number not in BODIES:
            raise _not_ours(f"a message of kind {number}")
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise _not_ours(f"a message of {num_bytes} bytes")
        data = self._receive_body(num_bytes)
        try:
            message: Message = msgspec.msgpack.decode(data, type=BODIES[Kind(number)])
        except msgspec.DecodeError as error:
            raise _not_ours(f"a {Kind(number).name} that cannot be read ({error})") from None
        return message

    def receive_into(self, target: memoryview) -> None:
        """Fill a writable buffer."""
        first, num_bytes = 0, len(target)
        while first < num_bytes:
            self._use_time_left()
            try:
                got = self._socket.recv_into(target[first:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _broken(error) from error
            if not got:
                raise _gone()
            first += got

    def receive_block(self, header: memoryview, payload: memoryview) -> None:
        """Receive the body of a ``BLOCK`` and the head of the frame after it, which saves a call for each block.

        Args:
            header: Writable buffer, filled completely.
            payload: Writable buffer, filled completely.
        """
        self._use_time_left()
        try:
            got = self._socket.recvmsg_into([header, payload, self._head], 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise _broken(error) from error
        if not got:
            raise _gone()
        for target in (header, payload):
            if got < len(target):
                self.receive_into(target[got:])
            got = max(0, got - len(target))
        self._num_head_bytes = got

    @property
    def is_gone(self) -> bool:
        """True if the other side has closed the connection and nothing is left to receive; does not wait."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def has_more(self, wait_s: float) -> bool:
        """Return whether data arrives within so many seconds; also true if the connection was closed."""
        if self._num_head_bytes:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * wait_s))

    def cut(self) -> None:
        """Shut the connection down: blocked calls raise. From any thread; may be called twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is disconnected already

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()

    def _receive_head(self) -> tuple[int, int]:
        if self._num_head_bytes < _HEAD.size:
            self.receive_into(memoryview(self._head)[self._num_head_bytes :])
        self._num_head_bytes = 0
        num_bytes, number, zero = _HEAD.unpack(self._head)
        if zero:
            raise _not_ours(f"a frame that begins with {bytes(self._head)!r}")
        return num_bytes, number

    def _receive_body(self, num_bytes: int) -> bytearray:
        """Receive so many bytes; memory grows as they arrive, so that a head alone allocates nothing."""
        data = bytearray()
        while len(data) < num_bytes:
            first = len(data)
            data += bytes(min(num_bytes - first, max(first, _FIRST_BYTES)))
            with memoryview(data) as view, view[first:] as part:
                self.receive_into(part)
        return data

    def _use_time_left(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferError("The other engine took too long.", cause=TransferCause.DEADLINE)
        if left_s < _ARMED_RATIO * self._armed_s:
            self._arm(left_s)

    def _arm(self, timeout_s: float) -> None:
        """Set the socket's own time-outs: Python's cost one more system call per call."""
        self._armed_s = timeout_s
        value = struct.pack("@ll", *divmod(max(1, int(timeout_s * 1e6)), 1_000_000))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as error:
            raise _broken(error) from error


def _behind(pieces: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> list[bytes | bytearray | memoryview]:
    """Return the rest of pieces after so many bytes."""
    if num_bytes == sum(map(len, pieces)):
        return []
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [memoryview(piece)[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []


def _broken(error: OSError) -> TransferError:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return TransferError("The other engine took too long.", cause=TransferCause.DEADLINE)
    return TransferError(f"The connection to the other engine broke: {error}.", cause=TransferCause.UNREACHABLE)


def _gone() -> TransferError:
    return TransferError("The other engine closed the connection.", cause=TransferCause.UNREACHABLE)


def _not_ours(what: str) -> TransferError:
    return TransferError(
        f"The other side does not speak the KV protocol: it sent {what}.",
        cause=TransferCause.CORRUPT,
        hint="Is something else listening on this port?",
    )
