"""Counts running requests and refuses new ones during a shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis_server.errors import EngineUnavailableError, as_api_error
from trencadis_server.middleware.failures import refuse

__all__ = ["DOCUMENT_PATHS", "OPEN_PATHS", "DrainGuard", "DrainMiddleware", "draining_error"]

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Paths for operators and their tools: they need no key, and are answered until the server ends."""
DOCUMENT_PATHS = frozenset({"/", "/docs", "/openapi.json"})
"""Paths that document the API, with those below ``/docs``: they need no key, since a browser that opens one sends none,
and they hold only what is public with this software."""


class DrainGuard:
    """Counts HTTP requests other than those of operators. Event loop only.

    Attributes:
        is_draining: Whether further requests are refused.
        num_inside: Number of running HTTP requests.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def close(self) -> None:
        """Refuse requests from now on."""
        self.is_draining = True

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Wait until no request is running."""
        await self._is_empty.wait()


class DrainMiddleware:
    """Counts requests, and answers 503 while the server shuts down.

    Args:
        app: The application that it wraps.
        gate: Drain guard, shared with the code that shuts the server down.
    """

    def __init__(self, app: ASGIApp, *, gate: DrainGuard) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._gate.is_draining:
            # The connection ends with the answer, so that the next attempt finds another server.
            await refuse(scope, receive, send, as_api_error(draining_error()), close=True)
            return
        with self._gate.inside():
            await self._app(scope, receive, send)


def draining_error() -> EngineUnavailableError:
    """Return the error for requests during a shutdown. Pure."""
    # Another server behind the same address may take the next attempt at once.
    return EngineUnavailableError("The server is shutting down.", state="draining", retry_after_s=1.0)
