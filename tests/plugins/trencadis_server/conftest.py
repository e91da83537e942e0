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

from trencadis.client.async_llm import AsyncLLM
from trencadis.clock import SystemClock
from trencadis.config import Config
from trencadis.registry import Registry
from trencadis_server.app import make_app
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.middleware.limits import AdmissionControl

House = Callable[..., tuple[Config, Registry]]


@attrs.frozen(eq=False)
class OneEngine:
    """An engine that never ends."""

    llm: AsyncLLM


@attrs.frozen(eq=False)
class Api:
    """A server, and a client that talks to it without a socket."""

    http: httpx.AsyncClient
    app: Any
    llm: AsyncLLM
    context: ServerContext
    admission: AdmissionControl

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a body to a model named "demo"."""
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
        content = json.dumps({"model": "demo", "stream": True, **body}).encode()
        gone = asyncio.Event()
        seen: list[str] = []
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            data = message.get("body", b"").decode()
            if data and not gone.is_set():
                seen.append(data)
                if await on_event(data):
                    gone.set()

        await self.app(_post_scope(path, len(content)), receive, send)
        return seen

    async def leave(self, path: str, when: threading.Event, **body: Any) -> int:
        """Ask for a whole answer, leave as soon as ``when`` is set, and return the status nobody reads."""
        content = json.dumps({"model": "demo", **body}).encode()
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])
        statuses: list[int] = []

        async def receive() -> Any:
            for message in messages:
                return message
            await asyncio.to_thread(when.wait, 20)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self.app(_post_scope(path, len(content)), receive, send)
        (status,) = statuses
        return status

    async def until_idle(self) -> tuple[int, int]:
        """Wait until the engine has carried out every command so far: it obeys in order.

        Returns:
            Blocks in use, and tokens that the engine has made.
        """
        async for _ in self.llm.generate((9,), request_id="the last"):
            pass
        engine: Any = self.llm._runner.frontend.engine
        # The last request's blocks are free once the step is over in which it ended.
        async for _ in self.llm.generate((9,), request_id="behind the last"):
            pass
        return engine.engine._state.blocks.num_used, engine.engine.totals.num_emitted_tokens


def _post_scope(path: str, num_bytes: int) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(num_bytes).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("client", 1),
        "server": ("server", 80),
    }


@pytest.fixture
def serve(fake_house: House) -> Callable[..., Any]:
    """Runs a coroutine with a server."""

    def go(use: Callable[[Api], Awaitable[Any]], *, config: ServerConfig | None = None, **house: Any) -> Any:
        async def main() -> Any:
            async with AsyncLLM.from_config(*fake_house(**house)) as llm:
                return await asyncio.wait_for(_with_server(llm, config or ServerConfig(), use), timeout=30)

        return asyncio.run(main())

    return go


async def _with_server(llm: AsyncLLM, config: ServerConfig, use: Callable[[Api], Awaitable[Any]]) -> Any:
    clock = SystemClock()
    admission = AdmissionControl(
        max_requests=config.max_requests, max_waiting_tokens=config.max_waiting_tokens, clock=clock
    )
    names = tuple((config.model_name or "demo").split(","))
    context = ServerContext(
        OneEngine(llm), config=config, model_names=names, admission=admission, clock=clock, created=7
    )
    app = make_app(context)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        result = await use(Api(http=http, app=app, llm=llm, context=context, admission=admission))
    assert (admission.num_requests, admission.num_waiting_tokens) == (0, 0)
    return result
