"""Rejected requests with transfer parameters: the engine that holds their KV is notified at once.

A router lets one server compute a prefix, and sends the request on to another. If that one rejects it, the first would
hold the blocks until their lease ends. Only this middleware sees every rejection, including those of bodies with
invalid fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.errors import InvalidRequestError, TrencadisError
from trencadis.records.request import transfer_table
from trencadis_server.context import ServerContext
from trencadis_server.errors import ApiError
from trencadis_server.fair_threads import FairThreads
from trencadis_server.protocol.json_body import decode

__all__ = ["TransferRejectionMiddleware"]


_FIELD = "kv_transfer_params"


class TransferRejectionMiddleware:
    """Notifies the engine of rejected requests with transfer parameters.

    Args:
        app: The application that it wraps.
        context: Context of the server, with the current engine.
    """

    def __init__(self, app: ASGIApp, *, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._threads = (
            FairThreads()
        )  # without accounts: the engine is notified of each rejection, however many there were
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
                self._refused(body, scope.get("state", {}).get("caller", ""))
            await send(message)

        await self._app(scope, read, write)

    def _refused(self, body: bytes, caller: str) -> None:
        if _FIELD.encode() in body:
            # The client need not wait for it.
            task = asyncio.create_task(self._tell(body, caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, body: bytes, caller: str) -> None:
        call = functools.partial(_transfer_params, body)
        params = await self._threads.run(call, num_characters=len(body), caller=caller)
        if params:
            with contextlib.suppress(TrencadisError):
                await self._context.llm.reject_transfer(params)


def _transfer_params(body: bytes) -> dict[str, Any]:
    """Return the transfer parameters of a body; empty if it has none or invalid ones. Pure."""
    with contextlib.suppress(ApiError, InvalidRequestError):
        data = decode(body)
        params = data.get(_FIELD) if isinstance(data, dict) else None
        if isinstance(params, dict):
            return transfer_table(params) or {}
    return {}
