"""Sockets to listen on, bound before anything slow begins: a port in use is known at once, and said in words.

They go on listening when the process has run out of descriptors: asyncio and uvloop each do something else then, one of them
without a line in the log, so that connections are accepted here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable

from trencadis.errors import ConfigError

__all__ = ["AcceptLoop", "listen", "url_of"]

logger = logging.getLogger("trencadis.server")

_BACKLOG = 2048

_PAUSE_S = 0.5
"""After a connection could not be accepted: it waits in the kernel meanwhile."""

_SILENCE_S = 30.0
"""Between two lines about it in the log."""


def listen(
    host: str, port: int, *, setting: str = "server.port", meaning_of_zero: str = "any free one"
) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Name or address.
        port: Port; 0: any free one.
        setting: The setting behind the port, for messages.
        meaning_of_zero: What the setting 0 stands for, for messages.

    Raises:
        ConfigError: The address does not exist, or the port is in use or forbidden.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f'[server] host = "{host}": no such address: {error.strerror or error}.', hint="Write 127.0.0.1 or 0.0.0.0."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f'[server] host = "{host}": this machine does not have that address.',
                hint="Correct server.host: 127.0.0.1, 0.0.0.0, or an address of this machine.",
            ) from error
        raise ConfigError(
            f"{setting} = {port}: {_reason(error, host)}", hint=f"Choose another {setting}; 0: {meaning_of_zero}."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as clients write it. Pure."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class AcceptLoop:
    """Accepts the connections of a listening socket until :meth:`close`, and goes on when one cannot be accepted.

    Stands in for ``asyncio.Server`` in uvicorn's server. Used by one event loop.

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
            "A connection to %s could not be accepted, %d so far: %s. It waits, and is tried again; if this goes on, let the process "
            "open more files (ulimit -n, LimitNOFILE).",
            url_of(self._listener),
            self._num_failures,
            error.strerror or error,
        )


def _reason(error: OSError, host: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"the port is in use on {host}."
        case errno.EACCES:
            return "this user may not listen on it."
        case _:
            return f"cannot listen on it: {os.strerror(error.errno or 0)}."
