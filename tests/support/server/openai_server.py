"""The HTTP API on a loopback port without a supervisor, with an engine that can be taken away, and the official client of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import openai
import uvicorn

from trencadis import AsyncLLM
from trencadis.clock import SystemClock
from trencadis.errors import EngineEndedError
from trencadis_server.app import make_app
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.middleware.limits import AdmissionControl

__all__ = ["Engines", "Running", "running"]


@attrs.define(eq=False)
class Engines:
    """An engine that can be taken away.

    Attributes:
        current: The engine; None: it is gone.
    """

    current: AsyncLLM | None

    @property
    def llm(self) -> AsyncLLM:
        """The engine.

        Raises:
            EngineEndedError: It is gone.
        """
        if self.current is None:
            raise EngineEndedError("the engine died: out of memory.")
        return self.current


@attrs.frozen(eq=False)
class Running:
    """A server on loopback.

    Attributes:
        url: Of its API.
        engines: What serves.
        admission: Its caps.
    """

    url: str
    engines: Engines
    admission: AdmissionControl

    def client(self, **options: Any) -> openai.OpenAI:
        """Return a client that asks once and has no key, unless options say so."""
        return openai.OpenAI(**{"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 60, **options})


@contextmanager
def running(llm: AsyncLLM, config: ServerConfig) -> Iterator[Running]:
    """Have a server for as long as the block runs; the engine outlives it."""
    clock = SystemClock()
    admission = AdmissionControl(
        max_requests=config.max_requests, max_waiting_tokens=config.max_waiting_tokens, clock=clock
    )
    engines = Engines(llm)
    context = ServerContext(engines, config=config, model_names=("demo",), admission=admission, clock=clock, created=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(context), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", engines, admission)
        finally:
            server.should_exit = True
            thread.join()
