"""Accepts connections, also after the process ran out of descriptors.

asyncio writes a hundred tracebacks a second then, and uvloop closes connections without a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

__all__ = ["AcceptLoop"]

logger = logging.getLogger("trencadis.server")

_PAUSE_S = 0.5
"""After a connection could not be accepted: it waits in the kernel meanwhile."""

_SILENCE_S = 30.0
"""Between two lines about it in the log."""


class AcceptLoop:
    """Accepts the connections of a listening socket until :meth:`close`, and goes on when one cannot be accepted.

    Has the methods of ``asyncio.Server`` that end it. Used by one event loop.

    Args:
        listener: Listens; not closed here.
        make_protocol: Returns the protocol of a new connection.
    """

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_failures = 0
        self._said_s = float("-inf")
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Accept no more; connections that are open stay."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is accepted any more."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._complain(error)
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await loop.connect_accepted_socket(self._make_protocol, connection)
            except OSError as error:
                logger.debug("A connection ended before it was served: %s", error)
                connection.close()

    def _complain(self, error: OSError) -> None:
        """Say that a connection could not be accepted: the first time, and then at most twice a minute."""
        self._num_failures += 1
        if time.monotonic() < self._said_s + _SILENCE_S:
            return
        self._said_s = time.monotonic()
        logger.error(
            "A connection to %s, port %d, could not be accepted, %d so far: %s. It waits, and is tried again; if this goes on, let the "
            "process open more files (ulimit -n, LimitNOFILE).",
            *self._listener.getsockname()[:2],
            self._num_failures,
            error.strerror or error,
        )
