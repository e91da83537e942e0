"""An application and its context for tests: any engine, no sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI

from trencadis.clock import SystemClock
from trencadis_server.app import make_app
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.errors import EngineUnavailableError
from trencadis_server.middleware.limits import AdmissionControl


class NoEngine:
    """An engine source that has none."""

    @property
    def llm(self) -> Any:
        raise EngineUnavailableError("The engine is loading.", state="loading", retry_after_s=5.0)


class OneEngine:
    """An engine source that has always the same."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm


def make_context(
    engines: Any = None, *, clock: Any = None, server: ServerConfig | None = None, created: int = 1, **config: Any
) -> ServerContext:
    server = server or ServerConfig(**config)
    clock = clock or SystemClock()
    return ServerContext(
        engines or NoEngine(),
        config=server,
        model_names=("fake",),
        admission=AdmissionControl(
            max_requests=server.max_requests, max_waiting_tokens=server.max_waiting_tokens, clock=clock
        ),
        clock=clock,
        created=created,
    )


def app_with(*routers: APIRouter, engines: Any = None, clock: Any = None, more: Any = None, **config: Any) -> FastAPI:
    return make_app(make_context(engines, clock=clock, **config), routers=routers, **(more or {}))


def ask(app: FastAPI, *requests: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """Return the answers to requests, one after the other: (method, path) or (method, path, arguments of httpx)."""

    async def main() -> list[httpx.Response]:
        async with client_of(app) as client:
            return [await client.request(one[0], one[1], **(one[2] if len(one) > 2 else {})) for one in requests]

    return asyncio.run(main())


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def assert_error(answer: httpx.Response, status: int, *, code: str | None = None, param: str | None = None) -> str:
    """Check that an answer is an error in OpenAI's shape, with a request id; returns its message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert answer.headers["x-request-id"]
    assert "detail" not in answer.json()
    return str(error["message"])
