"""Messages between an engine and a rank, over a pair of connected sockets, of one machine or of two.

    length (4 bytes)   kind (1 byte)   number (8 bytes)   payload

The kernel wakes the reader and reports the end of the other process at once; nothing spins, and nothing is left of a process that was
killed. Sending never waits: what does not fit into the socket waits in this process for the next :meth:`RankLink.flush`.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["Kind", "LinkClosedError", "RankLink"]

_HEADER: Final = struct.Struct("<IBQ")
_MAX_BYTES: Final = 2**32 - 1
_READ_BYTES: Final = 1 << 13, 1 << 22
"""At least and at most in one read: a buffer of that size is made for each."""


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 0
    """Name and arguments of a method; answered by ``RESULT`` or ``ERROR`` with the same number."""
    BATCH = 1
    """A step; answered by ``OUTPUT`` or ``ERROR``, of ranks without an output only if they have something to report."""
    RESULT = 2
    OUTPUT = 3
    ERROR = 4
    PROGRESS = 5
    """Numbers of buckets that are prepared and of all, while a ``CALL`` runs."""
    BEAT = 6
    """Sent every second by ranks on other machines while they have something to answer."""


class LinkClosedError(Exception):
    """The other process has ended."""


class RankLink:
    """One end of a pair of sockets; used by one thread at a time.

    Args:
        end: Connected; closed with the link.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 22)  # the kernel takes what it allows
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        """Return a file that is readable when messages, or the end of the other process, have come."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether :meth:`flush` has something to do."""
        return bool(self._unsent)

    def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        """Send a message, or keep it for :meth:`flush`.

        Raises:
            LinkClosedError: The other process has ended.
            ValueError: The payload has 4 GiB or more.
        """
        if len(payload) > _MAX_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes; a rank takes at most {_MAX_BYTES}")
        header = _HEADER.pack(len(payload), kind, number)
        if not self._unsent:
            sent = self._sent([header, payload])
            if sent == len(header) + len(payload):
                return
            whole = memoryview(header + payload)[sent:]
        else:
            whole = memoryview(header + payload)
        self._unsent.append(whole)

    def flush(self) -> None:
        """Send what waits, as much as the socket takes.

        Raises:
            LinkClosedError: The other process has ended.
        """
        while self._unsent:
            part = self._unsent[0]
            sent = self._sent([part])
            if sent < len(part):
                self._unsent[0] = part[sent:]
                return
            self._unsent.popleft()

    def receive(self) -> tuple[Kind, int, bytes] | None:
        """Return the next message that has come whole; None: there is none yet.

        Raises:
            LinkClosedError: The other process has ended, and everything it sent was received.
        """
        message = self._take()
        while message is None:
            try:
                part = self._socket.recv(self._num_expected())
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise LinkClosedError from error
            if not part:
                raise LinkClosedError
            self._received += part
            message = self._take()
        return message

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something has come or, if messages wait, can be sent; False: the time is over."""
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self._socket.close()

    def _num_expected(self) -> int:
        """Return how many bytes to read: the rest of a message whose head has come."""
        least, most = _READ_BYTES
        if len(self._received) < _HEADER.size:
            return least
        length: int = _HEADER.unpack_from(self._received)[0]
        return min(most, max(least, length - len(self._received)))

    def _take(self) -> tuple[Kind, int, bytes] | None:
        received = self._received
        if len(received) < _HEADER.size:
            return None
        length, kind, number = _HEADER.unpack_from(received)
        end = _HEADER.size + length
        if len(received) < end:
            return None
        payload = bytes(memoryview(received)[_HEADER.size : end])
        del received[:end]
        return Kind(kind), number, payload

    def _sent(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send parts; returns how many bytes the socket took."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosedError from error
