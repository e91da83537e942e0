from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from trencadis_server.generation.connection import CLIENT_GONE, answer_while_connected, while_connected


async def stays() -> Any:
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


def test_work_for_a_client_that_stays_is_returned() -> None:
    async def work() -> int:
        return 5

    assert asyncio.run(while_connected(stays, work())) == 5


def test_an_error_of_the_work_is_passed_on() -> None:
    async def work() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        asyncio.run(while_connected(stays, work()))


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


def test_nobody_reads_the_answer_to_a_client_that_left() -> None:
    class Request:
        receive = staticmethod(leaves)

    request: Any = Request()
    response = asyncio.run(answer_while_connected(request, stays()))
    assert response.status_code == CLIENT_GONE
