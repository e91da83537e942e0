"""The client's connection: work that stops when the client disconnects, and writes that do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

__all__ = ["CLIENT_GONE", "DIRECT_WRITES", "DirectWrites", "answer_while_connected", "direct_writes", "while_connected"]

_T = TypeVar("_T")
CLIENT_GONE = 499
"""Status of a request whose client left before the answer. Source: nginx; no RFC has one."""
DIRECT_WRITES = "trencadis.direct_writes"
"""Name of the ASGI extension by which a server offers :class:`DirectWrites`."""


class DirectWrites(Protocol):
    """Writes parts of the body of an answer that has begun, without an ASGI message and a task for each.

    Attributes:
        num_bytes: Bytes that were written, for counters of the answer's size.
    """

    num_bytes: int

    @property
    def is_ready(self) -> bool:
        """True while the answer has begun and is not complete, and no earlier data wait to be sent."""
        ...

    def write(self, data: bytes) -> None:
        """Write a part of the body; only if :attr:`is_ready`."""
        ...


def direct_writes(scope: Scope) -> DirectWrites | None:
    """Return the direct writes for a request; None if the server offers none, as in tests of the application alone."""
    found: DirectWrites | None = scope.get("extensions", {}).get(DIRECT_WRITES)
    return found


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of ``work``; cancel it and wait for its clean-up if the client disconnects.

    Args:
        receive: ASGI ``receive`` of the connection; the request's body must have been read.
        work: Coroutine to run.

    Raises:
        ClientDisconnect: The client disconnected first.
        BaseException: Any exception of ``work``.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response that ``work`` makes, or an empty one with status 499 if the client disconnected.

    Raises:
        BaseException: Any exception of ``work``.
    """
    try:
        return await while_connected(request.receive, work)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
