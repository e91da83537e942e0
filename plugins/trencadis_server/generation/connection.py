"""Runs work for a request only while its client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

__all__ = ["CLIENT_GONE", "answer_while_connected", "while_connected"]

_T = TypeVar("_T")
CLIENT_GONE = 499
"""Status of a request whose client left before the answer. Source: nginx; no RFC has one."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of ``work``; cancel it and wait for its clean-up if the client disconnects.

    Args:
        receive: Of the connection; the request's body must have been read.
        work: What to do.

    Raises:
        ClientDisconnect: The client left first.
        BaseException: Whatever ``work`` raises.
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
        BaseException: Whatever ``work`` raises.
    """
    try:
        return await while_connected(request.receive, work)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
