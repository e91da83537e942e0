from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from trencadis_server.generation.connection import while_connected


async def stays() -> Any:
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


def test_work_for_a_client_that_leaves_has_cleaned_up_before_anybody_hears_of_it() -> None:
    seen = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(leaves, work()))
    assert seen == ["cleaned up"]


def test_messages_that_are_no_farewell_change_nothing() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(receive, stays()))


def test_cancelling_the_caller_cancels_the_work() -> None:
    seen = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.create_task(while_connected(stays, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cancelled"]
