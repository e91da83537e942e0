"""Answers given without a route: by middlewares, which have no more than ``receive`` and ``send``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from trencadis_server.errors import ApiError

__all__ = ["error_headers", "has_body", "refuse", "send_error"]

_LINGER_S = 2.0
"""How long a refused client may go on sending: closing at once would destroy the answer it has not read."""

_PACE_S = 0.01
"""Between two pieces of what a refused client goes on sending: it costs the server at most some 30 MB/s, and others nothing."""


def error_headers(error: ApiError, *, num_bytes: int, close: bool = False) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error's answer. Pure.

    Args:
        error: The error.
        num_bytes: Length of its encoded body.
        close: The connection ends with the answer.
    """
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "content-length": str(num_bytes),
        **({"connection": "close"} if close else {}),
        **error.headers,
    }
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_error(send: Send, error: ApiError, *, close: bool = False, more_body: bool = False) -> None:
    """Answer with an error.

    Args:
        send: Of the request.
        error: The error.
        close: The connection ends with the answer.
        more_body: The client has all of it, but the answer is not declared complete: the caller does that.
    """
    body = error.encoded()
    headers = error_headers(error, num_bytes=len(body), close=close)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError, *, close: bool = False) -> None:
    """Answer with an error before the body was read: what still comes is thrown away for a while, then the connection closes.

    Args:
        scope: Of the request.
        receive: Of the request.
        send: Of the request.
        error: The error.
        close: The connection ends with the answer, also if there is no body.
    """
    if not has_body(scope):
        await send_error(send, error, close=close)
        return
    await send_error(send, error, close=True, more_body=True)
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                await asyncio.sleep(_PACE_S)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(scope: Scope) -> bool:
    """Return whether a request announces a body. Pure."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
