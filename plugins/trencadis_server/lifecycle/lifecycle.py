"""Runs a server: listen, load, serve, drain, close.

run ─ HTTP listens ─ engine loads ─ … ─ stop ─▶ drain: nothing new, running ones end ─▶ engine closes ─▶ HTTP closes
└─ stop again ─▶ at once
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from trencadis.accept_loop import AcceptLoop
from trencadis.errors import TrencadisError
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.guarded_connection import connection_class
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.drain_guard import DrainGuard

__all__ = ["Service", "event_loop_factory"]

logger = logging.getLogger("trencadis.server")

_LAST_ANSWERS_S = 3
"""Time for which answers may still be sent after every request has ended, seconds."""


class _HttpServer(uvicorn.Server):
    """Uvicorn's server with its own accept loop, and without signal handlers, which the caller installs."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])

        def make_protocol() -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        self.servers = [AcceptLoop(one, make_protocol) for one in sockets or ()]  # type: ignore[misc]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One server: HTTP, its engine, and their shutdown.

    Args:
        app: ASGI application.
        listener: Socket that it listens on.
        supervisor: Owner of the engine.
        gate: Drain guard of the application.
        config: Table ``[server]``.
        admin: Application and socket of the administration pages; None: there are none.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        *,
        supervisor: Supervisor,
        gate: DrainGuard,
        config: ServerConfig,
        admin: tuple[FastAPI, socket.socket] | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._gate = gate
        self._config = config
        self._listeners = [listener]
        self._servers = [_HttpServer(self._uvicorn_config(app))]
        if admin is not None:
            self._servers.append(_HttpServer(self._uvicorn_config(admin[0])))
            self._listeners.append(admin[1])
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._recording: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Drain: refuse new requests and let running ones finish; a second call stops at once. Event loop only."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    def record(self) -> None:
        """Have the engine write a flight record; the log has its path, or why there is none. Event loop only."""
        if self._recording is None or self._recording.done():
            self._recording = asyncio.create_task(self._record())

    async def _record(self) -> None:
        try:
            found = await self._supervisor.llm.flight_record()
        except TrencadisError as error:
            logger.warning("SIGUSR2: no flight record was written: %s", error)
        else:
            logger.info("SIGUSR2: flight records were written: %s", ", ".join(found["paths"]))

    async def run(self) -> None:
        """Serve until :meth:`stop` is called.

        Raises:
            TrencadisError: The engine could not be opened, or has ended too often; requests have been answered.
        """
        http = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(self._servers, self._listeners, strict=True)
        ]
        engine = asyncio.create_task(self._supervisor.run())
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({engine, stop, *http}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            await self._end(http, engine, stop)
        if not engine.cancelled():
            await engine

    async def _drain(self) -> None:
        self._gate.close()
        num_inside = self._gate.num_inside
        if num_inside:
            logger.info("Shutting down: %d requests may take %g s more.", num_inside, self._config.drain_timeout_s)
        waits = {asyncio.create_task(self._gate.wait_empty()), asyncio.create_task(self._hurrying.wait())}
        await asyncio.wait(waits, timeout=self._config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._gate.num_inside:
            logger.warning("%d requests are cut short.", self._gate.num_inside)

    async def _end(self, http: list[asyncio.Task[None]], engine: asyncio.Task[None], stop: asyncio.Task[bool]) -> None:
        self._gate.close()
        stop.cancel()
        # Closing the engine ends every request, so that clients get the outcome before HTTP closes.
        await self._supervisor.close()
        if not engine.done():
            await asyncio.wait({engine}, timeout=0.1)
            engine.cancel()
        for server in self._servers:
            server.should_exit = True
            server.force_exit = self._hurrying.is_set()
        await asyncio.gather(*http, return_exceptions=True)

    def _uvicorn_config(self, app: FastAPI) -> uvicorn.Config:
        config = self._config
        return uvicorn.Config(
            app,
            http=connection_class(head_timeout_s=config.body_timeout_s, send_timeout_s=config.send_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are about what clients send, which the access log has
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # seconds; a fraction is fine
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the fastest installed event loop; None: asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    uvloop = importlib.import_module("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
