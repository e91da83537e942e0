"""A real server on a loopback port, in a thread: uvicorn, sockets, supervisor and all; the engine is whatever is handed in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trencadis.clock import SystemClock
from trencadis_server.app import make_app
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.lifecycle.lifecycle import Service, event_loop_factory
from trencadis_server.lifecycle.opening import listen, url_of
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.drain_guard import DrainGuard
from trencadis_server.middleware.limits import AdmissionControl

TIMEOUT_S = 300  # of a busy machine


class LiveServer:
    """A server that runs.

    Attributes:
        url: Where it listens.
        admission: Its caps.
        gate: Who is inside.
        supervisor: Has the engine.
    """

    def __init__(self, open_llm: Callable[[], Any], *, backoff_s: float = 0.01, **config: Any) -> None:
        server = ServerConfig(**config)
        clock = SystemClock()
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self.gate, metrics = DrainGuard(), HttpMetrics()
        self.supervisor = Supervisor(
            open_llm,
            max_restarts=server.max_engine_restarts,
            window_s=server.restart_window_s,
            on_restart=metrics.note_restart,
            watch_s=0.02,
            backoff_s=backoff_s,
        )
        self.admission = AdmissionControl(
            max_requests=server.max_requests, max_waiting_tokens=server.max_waiting_tokens, clock=clock
        )
        self.context = ServerContext(
            self.supervisor, config=server, model_names=("demo",), admission=self.admission, clock=clock, created=1
        )
        self.app = make_app(self.context, gate=self.gate, http_metrics=metrics)
        self._service = Service(self.app, self._listener, supervisor=self.supervisor, gate=self.gate, config=server)
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop
        self._looping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="live-server")

    def start(self, *, until_ready: bool = True) -> None:
        """Start, and wait until the engine serves."""
        self._thread.start()
        assert self._looping.wait(TIMEOUT_S)
        if until_ready:
            self.call(self._ready())

    def stop(self) -> None:
        """Ask it to end; a second call hurries it."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._service.stop)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not end"

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's event loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until something holds, as seen from the server's event loop."""

        async def watch() -> None:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(0.002)

        self.call(watch())

    async def _ready(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.supervisor.is_serving.wait()

    def _main(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self._looping.set()
            await self._service.run()

        try:
            with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                runner.run(main())
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def running(open_llm: Callable[[], Any], **arguments: Any) -> Iterator[LiveServer]:
    """Have a server for as long as the block runs; it ends in order, hurried if it must."""
    server = LiveServer(open_llm, **arguments)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.stop()
        server.join()
