"""Request bodies: checks of encoding, size and time; a body is complete before it is parsed.

A body is collected here, so that no later code waits for a client, and a refused body costs no more memory than the
limit. All errors have OpenAI's format.
"""

from __future__ import annotations

import asyncio
import email.message

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis_server.errors import RATE_LIMIT, ApiError, TooBusyError, as_api_error, retry_headers
from trencadis_server.fair_threads import FairThreads
from trencadis_server.middleware.failures import has_body, refuse, send_error
from trencadis_server.protocol.json_body import MAX_VALUES, ValueCheck

__all__ = ["BodyMiddleware"]

_MAX_DIGITS = 18
"""Most digits of a length that is read as a number."""

_MAX_BODIES = 16
"""Maximum number of bodies of the largest size that may be received at once."""


_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
"""JSON between systems is UTF-8. Source: RFC 8259, section 8.1."""

_MAX_QUOTED = 40


class BodyMiddleware:
    """Refuses bodies: 415 if compressed or not UTF-8, 413 if too large, 408 if too late, 400 if they have too many values.

    Args:
        app: The application that it wraps; it gets the body in one message.
        max_bytes: Largest body, bytes.
        timeout_s: Longest time in which a body must arrive, seconds.
        max_values: Maximum number of values of a JSON body.
        threads: Threads on which the values of large bodies are counted; None: threads of its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        timeout_s: float,
        max_values: int = MAX_VALUES,
        threads: FairThreads | None = None,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_collected_bytes = 0
        self._values = ValueCheck(max_values, threads=threads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or not has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._collect(scope, receive)
        except ApiError as error:
            await refuse(scope, receive, send, error)
            return
        if body is None:
            return
        try:
            await self._values.check(body, caller=scope.get("state", {}).get("caller", ""))
        except (ApiError, TooBusyError) as error:
            await send_error(send, as_api_error(error))
            return
        await self._app(scope, _replay(body, receive), send)

    async def _collect(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected."""
        headers = Headers(scope=scope)
        _check_coding(headers)
        self._check_length(headers.get("content-length"))
        body = bytearray()
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    self._num_collected_bytes += len(chunk)
                    self._check_size(num_bytes)
                    body += chunk
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {self._timeout_s:g} s (server.body_timeout_s): {num_bytes} bytes came.",
                code="request_timeout",
            ) from None
        finally:
            self._num_collected_bytes -= num_bytes

    def _check_length(self, length: str | None) -> None:
        """Refuse a body by its ``Content-Length``, before a byte is read."""
        if length is not None and length.isdecimal() and (len(length) > _MAX_DIGITS or int(length) > self._max_bytes):
            raise self._too_large(f"is {length[:_MAX_DIGITS]} bytes long")

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise self._too_large("is longer")
        if self._num_collected_bytes > _MAX_BODIES * self._max_bytes:
            raise ApiError(
                429,
                "The server is receiving as much as it can hold. Send the request again later.",
                RATE_LIMIT,
                code="rate_limit_exceeded",
                headers=retry_headers(1.0),
            )

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            413,
            f"The body {what}; the server takes {self._max_bytes} bytes (server.max_body_bytes). Send a smaller request.",
            code="body_too_large",
        )


def _check_coding(headers: Headers) -> None:
    """Refuse a body with a content encoding or a charset other than UTF-8.

    Raises:
        ApiError: 415: the content is compressed, or not UTF-8; 400: the transfer encoding is not ``chunked``.
    """
    encodings = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if encodings not in {"", "identity"}:
        raise ApiError(
            415,
            f"Content-Encoding = {encodings[:_MAX_QUOTED]!a}: the server takes bodies as they are. Send it without compression.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    transfer = ", ".join(headers.getlist("transfer-encoding")).strip().lower()
    if transfer not in {"", "chunked"}:
        raise ApiError(
            400,
            f"Transfer-Encoding = {transfer[:_MAX_QUOTED]!a}: the server understands chunked alone.",
            code="unsupported_transfer_encoding",
        )
    kind = email.message.Message()
    kind["content-type"] = headers.get("content-type", "")
    charset = kind.get_content_charset("utf-8")
    if charset not in _CHARSETS:
        raise ApiError(
            415,
            f"Content-Type has charset = {charset[:_MAX_QUOTED]!a}: the server reads UTF-8. Send the body in UTF-8.",
            code="unsupported_charset",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns the body first, then the connection's messages, that is, a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
