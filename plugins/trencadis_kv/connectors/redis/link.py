"""One connection to a Redis server: gathered writes, scattered reads, and interruption from other threads.

Nothing is retried. A failure closes the connection, so a late reply is never taken for that of another command.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence

import attrs

from trencadis_kv.connectors.redis.config import RedisAddress
from trencadis_kv.connectors.redis.resp import ReplyReader, command
from trencadis_kv.wire.socket_buffers import set_buffer

__all__ = ["Credentials", "RedisLink", "Timeouts"]

_MAX_PIECES = 1024
"""``IOV_MAX`` of Linux: pieces that one call may gather."""


@attrs.frozen(kw_only=True)
class Timeouts:
    """Time-outs for a server's response, seconds.

    Attributes:
        connect_s: Longest time until the server accepts a connection.
        io_s: Longest time between two bytes sent or received.
    """

    connect_s: float
    io_s: float


@attrs.frozen(kw_only=True)
class Credentials:
    """Own credentials, and trusted certificates of the server.

    Attributes:
        user: User of the access control list; empty: the default user.
        password: Password; empty: none is sent.
        tls: TLS context; None: plain text.
    """

    user: str = ""
    password: str = attrs.field(default="", repr=False)
    tls: ssl.SSLContext | None = None


class RedisLink:
    """A connection, made by :meth:`open`. One thread at a time; :meth:`interrupt` from any.

    Args:
        address: Address of the server.
        credentials: Credentials presented to the server.
        timeouts: Timeouts for the server's responses.

    Attributes:
        reader: Parser of the server's replies.
    """

    def __init__(self, address: RedisAddress, credentials: Credentials, timeouts: Timeouts) -> None:
        self._address = address
        self._credentials = credentials
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_interrupted = False
        self.reader = ReplyReader(self._receive)

    @property
    def is_interrupted(self) -> bool:
        """Whether :meth:`interrupt` was called."""
        return self._is_interrupted

    def open(self) -> None:
        """Connect and authenticate.

        Raises:
            OSError: The server does not respond, or not in time.
            ServerError: The server refuses this client.
            ProtocolError: The server is not Redis.
        """
        self._connect_somewhere()
        self._sign_in()

    def is_quiet(self) -> bool:
        """True if it is open and no unexpected data has arrived: no closing message, no reply to an earlier command."""
        if self._socket is None or self.reader.num_buffered:
            return False
        if isinstance(self._socket, ssl.SSLSocket):
            return True  # records of TLS itself may come at any time
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send pieces one after the other; returns when the kernel has accepted all.

        Raises:
            OSError: The connection is lost, or the server takes nothing for too long.
        """
        connection = self._connection()
        if isinstance(connection, ssl.SSLSocket):
            connection.sendall(b"".join(pieces))  # TLS copies anyway, and pays for every record
            return
        rest = list(pieces)
        for first in range(0, len(rest), _MAX_PIECES):
            _send_all(connection, rest[first : first + _MAX_PIECES])

    def interrupt(self) -> None:
        """Make blocked calls raise ``OSError`` soon. From any thread; the link is unusable afterwards."""
        with self._lock:
            self._is_interrupted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; may be called twice."""
        with self._lock:
            ended, self._socket = self._socket, None
        if ended is not None:
            ended.close()

    def _places(self) -> Iterator[tuple[int, str | tuple[str, int]]]:
        if self._address.path:
            yield socket.AF_UNIX, self._address.path
            return
        for family, *_, address in socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM):
            yield family, address  # type: ignore[misc] # the tuple is whatever the family wants

    def _connect_somewhere(self) -> None:
        places = list(self._places())
        for family, address in places:
            try:
                self._connect(family, address)
            except OSError:
                self.close()
                if self._is_interrupted or (family, address) == places[-1]:
                    raise
            else:
                return

    def _connect(self, family: int, address: str | tuple[str, int]) -> None:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(self._timeouts.connect_s)
        self._adopt(connection)
        connection.connect(address)
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_buffer(connection, "receive")
        if self._credentials.tls is not None:
            secure = self._credentials.tls.wrap_socket(
                connection, server_hostname=self._address.host, do_handshake_on_connect=False
            )
            self._adopt(secure)
            secure.do_handshake()
        self._connection().settimeout(self._timeouts.io_s)

    def _adopt(self, connection: socket.socket) -> None:
        """Set the socket that :meth:`interrupt` closes, before any call blocks on it."""
        with self._lock:
            self._socket = connection
            if self._is_interrupted:
                raise ConnectionAbortedError("interrupted")

    def _sign_in(self) -> None:
        commands = []
        user, password = self._credentials.user, self._credentials.password
        if user:
            commands.append(command(b"AUTH", user.encode(), password.encode()))
        elif password:
            commands.append(command(b"AUTH", password.encode()))
        if self._address.database:
            commands.append(command(b"SELECT", b"%d" % self._address.database))
        # A server that wants a password reports it here, and not in the middle of a transfer.
        commands.append(command(b"PING"))
        self.send(commands)
        for _ in commands:
            self.reader.read_status()

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        connection = self._connection()
        if len(buffers) == 1 or isinstance(connection, ssl.SSLSocket):
            return connection.recv_into(buffers[0])
        return connection.recvmsg_into(buffers)[0]

    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionAbortedError("the connection is closed")
        return self._socket


def _send_all(connection: socket.socket, pieces: list[bytes | memoryview]) -> None:
    """Send pieces; handles partial writes."""
    first = 0
    while first < len(pieces):
        num_sent = connection.sendmsg(pieces[first:] if first else pieces)
        while first < len(pieces) and num_sent >= len(pieces[first]):
            num_sent -= len(pieces[first])
            first += 1
        if num_sent:
            pieces[first] = memoryview(pieces[first])[num_sent:]
