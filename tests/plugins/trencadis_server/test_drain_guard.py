from __future__ import annotations

import asyncio

from fastapi import APIRouter

from support.server.server_doubles import app_with, ask, assert_error, client_of
from trencadis_server.middleware.drain_guard import DrainGuard


def test_a_closed_gate_answers_503_and_ends_the_connection_but_operators_are_answered():
    gate = DrainGuard()
    app = app_with(more={"gate": gate})
    gate.close()
    work, health, metrics = ask(app, ("POST", "/v1/x", {"json": {}}), ("GET", "/health"), ("GET", "/metrics"))
    assert_error(work, 503, code="engine_draining")
    assert work.headers["connection"] == "close"
    assert (work.headers["x-should-retry"], work.headers["retry-after"]) == ("true", "1")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert metrics.status_code == 200


def test_it_knows_who_is_inside_until_the_last_has_left():
    gate, router, go_on = DrainGuard(), APIRouter(), asyncio.Event()

    @router.get("/v1/wait")
    async def wait() -> None:
        await go_on.wait()

    async def main():
        async with client_of(app_with(router, more={"gate": gate})) as client:
            await gate.wait_empty()
            requests = [asyncio.create_task(client.get("/v1/wait")) for _ in range(3)]
            while gate.num_inside < 3:
                await asyncio.sleep(0)
            gate.close()
            empty = asyncio.create_task(gate.wait_empty())
            requests[0].cancel()
            await asyncio.wait({requests[0]})
            assert (gate.num_inside, empty.done()) == (2, False)
            go_on.set()
            await asyncio.wait_for(empty, 10)
            assert [answer.status_code for answer in await asyncio.gather(*requests[1:])] == [200, 200]
            assert gate.num_inside == 0

    asyncio.run(main())


def test_a_request_that_fails_has_left():
    gate, router = DrainGuard(), APIRouter()

    @router.get("/v1/fail")
    async def fail() -> None:
        raise ValueError

    ask(app_with(router, more={"gate": gate}), ("GET", "/v1/fail"), ("GET", "/nowhere"))
    assert gate.num_inside == 0
