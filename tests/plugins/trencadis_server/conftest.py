"""The whole server without sockets: its ASGI application over an engine whose tokens are a known function of the prompt."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import httpx
import pytest

from support.core.paced_backend import num_used_blocks
from support.server.server_doubles import OneEngine, make_context
from trencadis.client.async_llm import AsyncLLM
from trencadis_server.app import make_app
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext


@attrs.frozen(eq=False)
class Api:
    """A server, and a client that talks to it without a socket."""

    http: httpx.AsyncClient
    app: Any
    llm: AsyncLLM
    context: ServerContext

    @property
    def admission(self) -> Any:
        return self.context.admission

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "demo", **body})

    async def ok(self, path: str, **body: Any) -> Any:
        """Send a body and return the answer, which must have status 200."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, path: str, **body: Any) -> tuple[int, Any]:
        """Send a body and return the status and the error of the answer."""
        response = await self.post(path, **body)
        return response.status_code, response.json()["error"]

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Send a body and return the events of the stream, which must end as it should."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def watch(self, path: str, on_event: Callable[[str], Awaitable[bool]], **body: Any) -> list[str]:
        """Ask for a stream and take it event by event; the client leaves when ``on_event`` returns True."""
        gone = asyncio.Event()
        seen: list[str] = []

        async def send(message: Any) -> None:
            data = message.get("body", b"").decode()
            if data and not gone.is_set():
                seen.append(data)
                if await on_event(data):
                    gone.set()

        await self._call(path, {"stream": True, **body}, gone.wait, send)
        return seen

    async def leave(self, path: str, when: threading.Event, **body: Any) -> int:
        """Ask for a whole answer, leave as soon as ``when`` is set, and return the status nobody reads."""
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self._call(path, body, lambda: asyncio.to_thread(when.wait, 20), send)
        (status,) = statuses
        return status

    async def _call(self, path: str, body: Any, until_gone: Callable[[], Awaitable[Any]], send: Any) -> None:
        content = json.dumps({"model": "demo", **body}).encode()
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            await until_gone()
            return {"type": "http.disconnect"}

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        }  # fmt: skip
        await self.app(scope, receive, send)

    async def until_idle(self) -> tuple[int, int]:
        """Wait until the engine, which obeys in order, has carried out every command so far.

        Returns:
            Blocks in use, and tokens that the engine has made.
        """
        for request_id in ("the last", "behind the last"):  # the last one's blocks are free once its step is over
            async for _ in self.llm.generate((9,), request_id=request_id):
                pass
        return num_used_blocks(self.llm), (await self.llm.totals())["num_emitted_tokens"]


@pytest.fixture
def serve(fake_house: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a coroutine with a server."""

    def go(use: Callable[[Api], Awaitable[Any]], *, config: ServerConfig | None = None, **house: Any) -> Any:
        async def main() -> Any:
            async with AsyncLLM.from_config(*fake_house(**house)) as llm:
                return await asyncio.wait_for(_with_server(llm, config or ServerConfig(), use), timeout=30)

        return asyncio.run(main())

    return go


async def _with_server(llm: AsyncLLM, config: ServerConfig, use: Callable[[Api], Awaitable[Any]]) -> Any:
    context = make_context(OneEngine(llm), server=config, created=7)
    context.model_names = tuple((config.model_name or "demo").split(","))
    app = make_app(context)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        result = await use(Api(http=http, app=app, llm=llm, context=context))
    assert (context.admission.num_requests, context.admission.num_waiting_tokens) == (0, 0)
    return result
