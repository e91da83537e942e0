"""Messages between two processes over a pair of connected sockets, of one machine or of two.

    length (4 bytes)   message

The kernel wakes the reader and reports the end of the other process at once; nothing spins, and nothing is left of a process that was
killed. Sending never waits: bytes that do not fit into the socket are kept in this process until the next :meth:`Link.flush`.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["Link", "LinkClosedError", "wait_for_end"]

_LENGTH: Final = struct.Struct("<I")
_MAX_BYTES: Final = 2**32 - 1
_READ_BYTES: Final = 1 << 16, 1 << 22
"""At least and at most in one read: a buffer of that size is made for each."""


class LinkClosedError(Exception):
    """The other process has ended."""


class Link:
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

    def send(self, *parts: bytes) -> None:
        """Send a message, or keep it for :meth:`flush`.

        Args:
            parts: Parts of the message, in order.

        Raises:
            LinkClosedError: The other process has ended.
            ValueError: The message has 4 GiB or more.
        """
        length = sum(map(len, parts))
        if length > _MAX_BYTES:
            raise ValueError(f"a message of {length} bytes; a link takes at most {_MAX_BYTES}")
        pieces = _LENGTH.pack(length), *parts
        sent = 0 if self._unsent else self._sent(pieces)
        if sent < _LENGTH.size + length:
            self._unsent.append(memoryview(b"".join(pieces))[sent:])

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

    def receive(self) -> list[bytes]:
        """Return, in order, the messages that have come whole, of some 4 MiB at most if more than one; does not wait.

        Raises:
            LinkClosedError: The other process has ended, and everything it sent was received.
        """
        least, most = _READ_BYTES
        while True:
            expected = min(most, max(least, self._num_missing()))
            try:
                part = self._socket.recv(expected)
            except BlockingIOError:
                break
            except ConnectionError:
                part = b""
            if not part:
                messages = self._take()
                if messages:
                    return messages
                raise LinkClosedError
            self._received += part
            if len(part) < expected or (len(self._received) >= most and not self._num_missing()):
                break
        return self._take()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something has come or, if messages wait, can be sent; False: the time is over."""
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self._socket.close()

    def _num_missing(self) -> int:
        """Return how many bytes the first message lacks; 0 if it is whole, or its length has not come."""
        if len(self._received) < _LENGTH.size:
            return 0
        length: int = _LENGTH.unpack_from(self._received)[0]
        return max(0, _LENGTH.size + length - len(self._received))

    def _take(self) -> list[bytes]:
        """Return the whole messages, and keep the rest."""
        received, messages, start = self._received, [], 0
        view = memoryview(received)
        while len(received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(received, start)[0]
            if end > len(received):
                break
            messages.append(bytes(view[begin:end]))
            start = end
        view.release()
        del received[:start]
        return messages

    def _sent(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send parts; returns how many bytes the socket took."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosedError from error


def wait_for_end(end: socket.socket) -> None:
    """Wait until the other end of a pair of sockets is closed; takes nothing that it sends. On a thread, over a duplicate."""
    poll = select.poll()
    poll.register(end, 0)  # the end is reported without being asked for
    poll.poll()
