"""One port before several servers: connection after connection goes to the next one; bytes are passed on as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

__all__ = ["Forwarder"]

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 2.0


class Forwarder:
    """Passes connections on; knows nothing of HTTP, so that streams, keep-alive and bodies of any size are the server's own.

    Args:
        host: To listen on, and where the servers are.
        ports: Of the servers.
    """

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._host = host
        self._ports = tuple(ports)
        self._next = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> int:
        """Listen; returns the port, which is any that is free if 0 was asked for.

        Raises:
            OSError: The port is in use.
        """
        self._server = await asyncio.start_server(self._accept, self._host, port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Listen no more, and cut what is open."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await self._connect()
        if server is None:
            writer.close()
            return
        try:
            await asyncio.gather(_pass_on(reader, server[1]), _pass_on(server[0], writer))
        except OSError:
            pass  # one of the two has gone; the other learns by the end of its connection
        finally:
            for one in (writer, server[1]):
                one.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Return a connection to the next server that takes one."""
        for _ in self._ports:
            port = self._ports[self._next % len(self._ports)]
            self._next += 1
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(self._host, port), _CONNECT_S)
        return None


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, and pass the end on."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
