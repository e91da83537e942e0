from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.errors import EngineEndedError
from trencadis_server.middleware.transfer_rejections import TransferRejectionMiddleware

PARAMS = {"do_remote_prefill": True, "remote_request_id": "t"}


def told(body: Any, *, status: int = 400, method: str = "POST", dead: bool = False) -> list[dict[str, Any]]:
    """Send a body through the middleware to an application that answers with ``status``; returns what the engine hears."""
    heard: list[dict[str, Any]] = []

    async def reject(params: dict[str, Any]) -> None:
        heard.append(params)
        if dead:
            raise EngineEndedError("dead")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    sent: list[Any] = []

    async def main() -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def receive() -> Any:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        context: Any = SimpleNamespace(llm=SimpleNamespace(reject_transfer=reject))
        middleware = TransferRejectionMiddleware(app, context=context)
        await middleware({"type": "http", "method": method}, receive, send)
        await asyncio.gather(*middleware._tasks)

    asyncio.run(main())
    assert sent == ["http.response.start", "http.response.body"]
    return heard


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_refused_request_is_told_to_the_engine_once(status: int) -> None:
    assert told({"prompt": "x", "kv_transfer_params": PARAMS}, status=status) == [PARAMS]


def test_answered_request_is_not() -> None:
    assert told({"prompt": "x", "kv_transfer_params": PARAMS}, status=200) == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x"},
        {"prompt": "kv_transfer_params"},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": {"a": "x" * 70_000}},
        {"messages": [{"kv_transfer_params": PARAMS}]},
        ["kv_transfer_params"],
        b'{"kv_transfer_params": {"a": NaN}}',
        b'{"kv_transfer_params": {"a": ',
        b'{"kv_transfer_params": ' + b"[" * 100_000,
        b'\xff"kv_transfer_params"',
        b"",
    ],
    ids=str,
)
def test_body_without_sound_parameters_is_nobodys_business(body: Any) -> None:
    assert told(body) == []


def test_other_methods_are_passed_through() -> None:
    assert told({"kv_transfer_params": PARAMS}, method="GET") == []


def test_dead_engine_changes_nothing_for_the_client() -> None:
    assert told({"kv_transfer_params": PARAMS}, dead=True) == [PARAMS]
