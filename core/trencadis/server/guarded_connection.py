"""One client's connection: what uvicorn's protocol does not guard against.

    a head that never ends, or comes a byte at a time ▶ closed after ``head_timeout_s`` or 64 KiB
    a client that takes nothing                       ▶ its connection is cut after ``send_timeout_s``; its request ends
    a client whose machine has gone                   ▶ TCP keep-alive notices
    bytes that are no HTTP                            ▶ 400 in OpenAI's shape

Works on top of either of uvicorn's HTTP implementations; it relies on their methods of ``asyncio.Protocol``, on
``send_400_response``, and on ``cycle``, the request being served.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

from trencadis.server.envelope import new_request_id
from trencadis.server.errors import ApiError
from trencadis.server.respond import error_headers

__all__ = ["MAX_HEAD_BYTES", "connection_class"]

MAX_HEAD_BYTES = 65536
"""Longest head of a request: its first line and all headers."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A silent client's machine is asked after 30 s, and given up 30 s later."""


def connection_class(*, head_timeout_s: float, send_timeout_s: float) -> type[asyncio.Protocol]:
    """Return the class of connections to give to uvicorn as ``http``.

    Args:
        head_timeout_s: Longest time from the first byte of a request, or from the connection, to the end of its head.
        send_timeout_s: Longest time in which a client may take nothing of what is sent.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: type[Any] = AutoHTTPProtocol
    attributes = {"head_timeout_s": head_timeout_s, "send_timeout_s": send_timeout_s}
    return type("GuardedConnection", (_Guards, base), attributes)


class _Guards(asyncio.Protocol):
    """Comes before uvicorn's protocol in the order of methods."""

    head_timeout_s: float
    send_timeout_s: float

    # Of uvicorn's protocols.
    cycle: Any
    transport: Any
    loop: asyncio.AbstractEventLoop

    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _num_unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _watch_peer(transport)
        # Nothing piles up in this process: whatever the kernel does not take pauses the sender.
        self.transport.set_write_buffer_limits(high=0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_idle = before is None or before.response_complete
        if is_idle and self._head_timer is None:
            self._await_head()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_head_timer()
        elif is_idle and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The head of the request is longer than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP; called by uvicorn's protocols."""
        self._refuse(400, "This is not HTTP as the server understands it.")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_progress)

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _check_progress(self) -> None:
        """Cut the connection if the client has taken nothing since the last look."""
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if num_unsent_bytes < self._num_unsent_bytes:
            self._num_unsent_bytes = num_unsent_bytes
            self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_progress)
        else:
            self._send_timer = None
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        self._stop_head_timer()
        error = ApiError(status, message, code="invalid_http", headers={"x-request-id": new_request_id()})
        body = error.encoded()
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in error_headers(error, num_bytes=len(body), close=True)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _watch_peer(transport: asyncio.BaseTransport) -> None:
    """Let the kernel ask whether the other machine is still there."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
