from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from support.server.server_doubles import app_with
from trencadis_server.asgi_call import post


def call(app, path, body):
    return asyncio.run(asyncio.wait_for(post(app, path, body), 10))


def test_the_answer_is_what_a_client_over_http_gets():
    router = APIRouter()

    @router.post("/v1/echo")
    async def echo(request: Request) -> dict[str, object]:
        return {"got": await request.json(), "type": request.headers["content-type"]}

    answer = call(app_with(router), "/v1/echo", b'{"a": 1}')
    assert answer.status == 200
    assert answer.body == b'{"got":{"a":1},"type":"application/json"}'
    assert answer.headers["x-request-id"].startswith("req_")


def test_an_answer_in_parts_is_put_together():
    router = APIRouter()

    @router.post("/v1/parts")
    async def parts() -> StreamingResponse:
        async def body():
            yield b"a"
            yield b"b"

        return StreamingResponse(body())

    assert call(app_with(router), "/v1/parts", b"{}").body == b"ab"


def test_errors_are_answers():
    assert call(app_with(), "/v1/nothing", b"{}").status == 404
