"""Request context: id, access log, metrics, and the answer to unexpected exceptions.

This is the outermost middleware: every answer carries ``x-request-id``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.clock import Clock
from trencadis.faults import reraise_interrupt
from trencadis_server.errors import as_api_error
from trencadis_server.generation.connection import CLIENT_GONE, DirectWrites, direct_writes
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.middleware.drain_guard import OPEN_PATHS
from trencadis_server.middleware.failures import send_error

__all__ = ["RequestContextMiddleware", "new_request_id", "request_id_of"]

logger = logging.getLogger("trencadis.server")
access = logging.getLogger("trencadis.access")

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(headers: Headers) -> str:
    """Return the client's ``x-request-id`` if it is short and plain, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """Return a unique request id."""
    return f"req_{uuid.uuid4().hex}"


class RequestContextMiddleware:
    """Sets each request's id, and logs and counts its end.

    Args:
        app: The application that it wraps.
        metrics: Counts requests.
        clock: Measures their durations.
        paths: Paths of the routes; a request that was refused before it reached its route is counted there, too.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: HttpMetrics, clock: Clock, paths: Collection[str] = frozenset()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "caller": ""}
        answer = _Answer(send, request_id, direct_writes(scope))
        start_s = self._clock.now_s()
        with self._metrics.in_flight():
            try:
                await self._app(scope, receive, answer.send)
            except ClientDisconnect:
                pass
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                reraise_interrupt(error)
                await self._fail(answer, scope, error, request_id)
            finally:
                self._note(scope, answer, self._clock.now_s() - start_s)

    async def _fail(self, answer: _Answer, scope: Scope, error: BaseException, request_id: str) -> None:
        logger.error(
            "%s %s failed (%s).",
            scope["method"],
            _plain(scope["path"]),
            request_id,
            exc_info=error,
            extra={"fields": {"request_id": request_id}},
        )
        # An answer that has begun is left incomplete, and the HTTP server cuts the connection: the client must notice.
        if not answer.status:
            await send_error(answer.send, as_api_error(error, request_id=request_id))

    def _note(self, scope: Scope, answer: _Answer, duration_s: float) -> None:
        state = scope["state"]
        status = answer.status or CLIENT_GONE
        known: str = scope["path"] if scope["path"] in self._paths else ""
        path = getattr(scope.get("route"), "path", known)
        self._metrics.note(
            route=path, method=scope["method"], status=status, num_bytes=answer.num_bytes, duration_s=duration_s
        )
        # Probes and scrapes come every few seconds; only their failures are logged as INFO.
        level = logging.DEBUG if scope["path"] in OPEN_PATHS and status < 500 else logging.INFO
        access.log(
            level,
            "%s %s %d %.3f s %d bytes %s%s",
            scope["method"],
            _plain(scope["path"]),
            status,
            duration_s,
            answer.num_bytes,
            state["request_id"],
            f" {state['caller']}" if state["caller"] else "",
            extra={
                "fields": {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "duration_s": round(duration_s, 6),
                    "bytes": answer.num_bytes,
                    "request_id": state["request_id"],
                    "caller": state["caller"],
                }
            },
        )


def _plain(path: str) -> str:
    """Return a path for the log, with line breaks escaped. Pure."""
    return ascii(path)[1:-1]


class _Answer:
    """Wraps ``send``: adds the id to the headers, and records status and length, including direct writes."""

    def __init__(self, send: Send, request_id: str, direct: DirectWrites | None) -> None:
        self._send = send
        self._direct = direct
        self._request_id = request_id
        self._num_sent_bytes = 0
        self.status = 0

    @property
    def num_bytes(self) -> int:
        return self._num_sent_bytes + (self._direct.num_bytes if self._direct is not None else 0)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._num_sent_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)
