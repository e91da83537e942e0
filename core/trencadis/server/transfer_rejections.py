"""Requests with transfer parameters that are answered with an error: who holds KV for them is told at once.

A router has a prefix computed by one server and sends the request on to another. If that one refuses it, for whatever reason, the first
would keep the blocks until their lease ends. Only this middleware sees every refusal: of a body that has the wrong fields, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.errors import TrencadisError
from trencadis.records import MAX_TRANSFER_BYTES
from trencadis.server.context import ServerContext

__all__ = ["TransferRejectionMiddleware"]


_FIELD = "kv_transfer_params"


class TransferRejectionMiddleware:
    """Tells the engine of refused requests that carry transfer parameters.

    Args:
        app: What is behind.
        context: Has the engine of the moment.
    """

    def __init__(self, app: ASGIApp, *, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = b""

        async def read() -> Message:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
            return message

        async def write(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._refused(body)
            await send(message)

        await self._app(scope, read, write)

    def _refused(self, body: bytes) -> None:
        params = _transfer_params(body)
        if params:
            # The client need not wait for it.
            task = asyncio.create_task(self._tell(params))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, params: dict[str, Any]) -> None:
        with contextlib.suppress(TrencadisError):
            await self._context.llm.reject_transfer(params)


def _transfer_params(body: bytes) -> dict[str, Any]:
    """Return the transfer parameters of a body; empty if it has none, or none that anybody wrote in good faith. Pure."""
    if _FIELD.encode() not in body:
        return {}
    try:
        data = json.loads(body)
        params = data.get(_FIELD) if isinstance(data, dict) else None
        if not isinstance(params, dict) or len(json.dumps(params, allow_nan=False)) >= MAX_TRANSFER_BYTES:
            return {}
    except (ValueError, RecursionError):
        return {}
    return params
