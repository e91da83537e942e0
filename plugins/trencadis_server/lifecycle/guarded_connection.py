"""HTTP connection with limits that uvicorn's protocol does not have.

    a head that never ends, or comes a byte at a time   ▶ 408 after ``head_timeout_s``; 431 after 64 KiB
    a connection on which no request begins             ▶ closed after ``head_timeout_s``
    chunk extensions or trailers without end            ▶ 413 when they exceed 64 KiB and the body together
    many requests sent ahead without taking the answers ▶ closed
    a client that takes nothing                         ▶ its connection is cut after ``send_timeout_s``; its request ends
    a client that has sent all and shut its sending side ▶ is answered, if it is still there
    a client whose machine has gone                     ▶ TCP keep-alive notices
    bytes that are no HTTP                              ▶ 400 in OpenAI's shape

Every byte of a request that is not its body is counted, whatever the parser makes of it: bytes are given to the parser
in slices, and those that it returns as body are subtracted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trencadis_server.errors import ApiError
from trencadis_server.generation.connection import DIRECT_WRITES
from trencadis_server.middleware.failures import error_headers
from trencadis_server.middleware.request_context import new_request_id

__all__ = ["MAX_HEAD_BYTES", "connection_class"]

access = logging.getLogger("trencadis.access")

MAX_HEAD_BYTES = 65536
"""Longest head of a request: its first line and all headers. As many bytes may be chunk sizes, extensions and trailers."""

_SLICE_BYTES = 16384
"""Bytes given to the parser at once; the rest of a read waits until the slice has been counted."""

_MAX_PIPELINED = 16
"""Most requests that a client may send ahead while an earlier one is answered."""

_LINGER_S = 2.0
"""Time for which a refused client may go on sending: closing at once would destroy the answer that it has not read."""

_MAX_DISCARDED_BYTES = 2**20
"""Most bytes that a refused client may go on sending."""

_HALF_CLOSED_S = 0.1
"""Interval at which a client that has shut its sending side is checked for having gone."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP keep-alive: a silent client's machine is probed after 30 s, and given up 30 s later."""


def connection_class(*, head_timeout_s: float, send_timeout_s: float) -> type[asyncio.Protocol]:
    """Return the connection class for uvicorn's ``http`` setting.

    Args:
        head_timeout_s: Longest time from the first byte of a request, or from the connection, to the end of its head.
        send_timeout_s: Longest time in which a client may take none of the bytes that are sent.
    """
    attributes = {"head_timeout_s": head_timeout_s, "send_timeout_s": send_timeout_s}
    return type("GuardedConnection", (_GuardedConnection,), attributes)


class _GuardedConnection(HttpToolsProtocol):
    head_timeout_s: float
    send_timeout_s: float

    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _active: RequestResponseCycle | None = None
    """Request on this connection that is served now; ``cycle`` is the newest one."""
    _problem = "This is not HTTP as the server understands it."
    _is_in_head = False
    _has_ended = False
    _is_refused = False
    _num_body_bytes = 0
    _num_other_bytes = 0
    _num_discarded_bytes = 0
    _num_unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it to Transport
        _watch_peer(transport)
        # No bytes pile up in this process: those that the kernel does not take pause the sender.
        self.transport.set_write_buffer_limits(high=0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._give_up()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        before = self.cycle
        if (before is None or before.response_complete) and self._head_timer is None:
            self._await_head()
        left = memoryview(data)
        while left and not self._is_refused and not self.transport.is_closing():
            room = MAX_HEAD_BYTES + self._num_body_bytes - self._num_other_bytes
            if room <= 0:
                self._refuse_excess()
                return
            part, left = left[: min(room, _SLICE_BYTES)], left[min(room, _SLICE_BYTES) :]
            self._feed(part)
        if self.cycle is not before:
            self._stop_head_timer()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's: True keeps the connection open
        last, active = self.cycle, self._active
        if self._is_refused or self._is_in_head or last is None or last.more_body or active is None:
            return None
        if active.response_complete:
            return None
        last.keep_alive = False
        if not active.response_started and active.scope["http_version"] == "1.1":
            # A client that has closed its socket answers with a reset, one that waits for the answer ignores it: RFC 9110, 15.2.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(_HALF_CLOSED_S, self._check_half_closed)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; called by uvicorn's protocol."""
        self._refuse(400, self._problem)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_progress)

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    # --------------------------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # a trailer is no header of the request: it comes after the request was checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._problem = f"More than {_MAX_PIPELINED} requests were sent ahead of the answer to the first."
            raise ValueError(self._problem)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]  # uvicorn's type names no extension of ours
            scope["extensions"] = {**scope.get("extensions", {}), DIRECT_WRITES: _DirectWrites(self.cycle)}
        if self._active is None or self._active.response_complete:
            self._active = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_body_bytes = self._num_other_bytes = 0
        self._has_ended = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._active = self.pipeline[-1][0]
        super().on_response_complete()

    # ------------------------------------------------------------------------------------------------------

    def _feed(self, part: memoryview) -> None:
        """Pass bytes to the parser, and count those outside of bodies."""
        self._has_ended = False
        before = self._num_body_bytes
        super().data_received(part)  # type: ignore[arg-type]  # the parser takes any buffer
        if not self._has_ended:
            self._num_other_bytes += len(part) - (self._num_body_bytes - before)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._end_late_head)

    def _end_late_head(self) -> None:
        if self._is_in_head:
            self._refuse(408, f"The head of the request did not arrive within {self.head_timeout_s:g} s.")
        else:
            self.transport.abort()

    def _check_progress(self) -> None:
        """Abort the connection if the client has read nothing since the last check."""
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if num_unsent_bytes < self._num_unsent_bytes:
            self._num_unsent_bytes = num_unsent_bytes
            self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_progress)
        else:
            self._send_timer = None
            self.transport.abort()

    def _check_half_closed(self) -> None:
        """Abort the connection if the client has reset it: the loop does not notice, since it does not read."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_HALF_CLOSED_S, self._check_half_closed)

    def _refuse_excess(self) -> None:
        if self._is_in_head or self.cycle is None or self.cycle.response_complete:
            self._refuse(431, f"The head of the request is longer than {MAX_HEAD_BYTES} bytes.")
        else:
            self._refuse(
                413,
                "The chunk extensions and trailers of the request are longer than its body and "
                f"{MAX_HEAD_BYTES} bytes together. Send the body with content-length.",
            )

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close the connection; further input is discarded for a while."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_head_timer()
        active = self._active
        if active is None or active.response_complete or not active.response_started:
            self.transport.write(_answer(status, message))
        # An answer that has begun ends here: another one inside it would be taken for a part of it.
        self._give_up()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _give_up(self) -> None:
        """Mark the requests of this connection as disconnected."""
        self.pipeline.clear()
        for cycle in (self._active, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class _DirectWrites:
    """Writes parts of one answer as uvicorn's ``send`` does, without a coroutine."""

    __slots__ = ("_cycle", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.num_bytes = 0

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return (
            cycle.response_started
            and bool(cycle.chunked_encoding)
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
        )

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _answer(status: int, message: str) -> bytes:
    request_id = new_request_id()
    access.info("A connection was refused: %d %s %s", status, request_id, message)
    code = "request_timeout" if status == HTTPStatus.REQUEST_TIMEOUT else "invalid_http"
    error = ApiError(status, message, code=code, headers={"x-request-id": request_id})
    body = error.encoded()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in error_headers(error, num_bytes=len(body), close=True)]
    return b"\r\n".join([*lines, b"", body])


def _watch_peer(transport: asyncio.BaseTransport) -> None:
    """Enable TCP keep-alive, which detects that the other machine is gone."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
