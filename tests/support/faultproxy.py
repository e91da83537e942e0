"""A TCP proxy that does what networks do: delays, throttles, stalls, cuts and damages, on purpose and at a chosen byte.

    client ─▶ to_server ─▶ server
    client ◀─ to_client ◀─ server

Bytes are counted per direction, over all connections, from the moment a fault is set. A fault at a byte happens once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

__all__ = ["Direction", "FaultProxy"]

_CHUNK_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)
"""Of ``SO_LINGER``: a reset is sent, as by a host whose process was killed."""


class Direction:
    """What happens to bytes that go one way; its methods may be called at any time, from any thread.

    Attributes:
        num_bytes: That went through since the last fault was set.
        happened: Set once a cut, a stall or a flip has come to its byte.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.happened = threading.Event()
        self._reset()

    def _reset(self) -> None:
        self.num_bytes = 0
        self.happened.clear()
        self._delay_s = self._second_per_byte = 0.0
        self._cut_at = self._stall_at = self._flip_at = -1
        self._is_ended = False

    def set(
        self,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        stall_at: int = -1,
        cut_at: int = -1,
        flip_at: int = -1,
    ) -> None:
        """Have these faults, and no others, from now on; without arguments bytes pass, also those of a stall.

        Args:
            delay_s: Before each run of bytes is passed on.
            bytes_per_s: Bytes pass no quicker; 0: as quick as they come.
            stall_at: After so many bytes nothing passes until the next ``set``.
            cut_at: After so many bytes the connection is reset.
            flip_at: The lowest bit of the byte with this index is inverted.
        """
        with self._changed:
            self._reset()
            self._delay_s, self._second_per_byte = delay_s, 1 / bytes_per_s if bytes_per_s else 0.0
            self._stall_at, self._cut_at, self._flip_at = stall_at, cut_at, flip_at
            self._changed.notify_all()

    def end(self) -> None:
        """Wake whoever is held up; nothing is held up any more."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def pass_on(self, data: bytearray, send: Callable[[bytes], None]) -> bool:
        """Send some bytes as the faults have it; False if the connection is to be cut."""
        while data:
            with self._changed:
                here, cut, stall = self._next(len(data))
                part = bytearray(data[:here])
                if 0 <= self._flip_at - self.num_bytes < here:
                    part[self._flip_at - self.num_bytes] ^= 1
                    self.happened.set()
                self.num_bytes += here
                pause_s = self._delay_s + here * self._second_per_byte
                if pause_s:
                    self._changed.wait_for(lambda: self._is_ended, pause_s)
            send(bytes(part))
            del data[:here]
            with self._changed:
                if cut:
                    self._cut_at = -1
                    self.happened.set()
                    return False
                if stall:
                    self.happened.set()
                    self._changed.wait_for(lambda: self._is_ended or self._stall_at < 0)
                    if self._is_ended:
                        return False
        return True

    def _next(self, num_bytes: int) -> tuple[int, bool, bool]:
        """Return how many bytes pass before something happens, and whether that is a cut or a stall."""
        cut, stall = (at - self.num_bytes if at >= 0 else num_bytes + 1 for at in (self._cut_at, self._stall_at))
        here = max(0, min(num_bytes, cut, stall))
        return here, here == cut, here == stall


class FaultProxy:
    """Listens on a loopback port and passes bytes to a server; a context manager.

    Args:
        port: Of the server, on 127.0.0.1.

    Attributes:
        port: Where it listens.
        to_server: What happens to bytes from clients.
        to_client: What happens to bytes from the server.
        num_connections: That clients have made.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.to_server, self.to_client = Direction(), Direction()
        self.num_connections = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for direction in (self.to_server, self.to_client):
            direction.end()
        self.cut()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "the proxy does not end"
        self._listener.close()

    def set_passing(self) -> None:
        """Let everything pass both ways."""
        self.to_server.set()
        self.to_client.set()

    def cut(self) -> None:
        """Reset all connections now."""
        with self._lock:
            ended, self._open = self._open, []
        for connection in ended:
            _break(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port), timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [client, server]
            left = threading.Barrier(2)
            self._run(lambda a=client, b=server, left=left: self._pump(a, b, self.to_server, left))
            self._run(lambda a=client, b=server, left=left: self._pump(b, a, self.to_client, left))

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction, left: threading.Barrier) -> None:
        """Pass bytes one way until either end is gone; the last of both ways closes."""
        try:
            while data := source.recv(_CHUNK_BYTES):
                if not direction.pass_on(bytearray(data), sink.sendall):
                    raise ConnectionAbortedError("cut")
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # cut here, or reset by an end: neither end is left waiting for the other
            _break(source)
            _break(sink)
        if left.wait() == 0:
            source.close()
            sink.close()

    def _run(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RDWR)
