"""Round-robin TCP forwarder: one port for several servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from trencadis.accept_loop import AcceptLoop

__all__ = ["Forwarder"]

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 2.0


class Forwarder:
    """Forwards connections as bytes; HTTP features such as streams and keep-alive are left to the servers.

    Args:
        host: Address on which both the forwarder and the servers listen.
        ports: Ports of the servers.
    """

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._host = host
        self._ports = tuple(ports)
        self._next = 0
        self._listener: socket.socket | None = None
        self._accepting: AcceptLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> int:
        """Listen; returns the port, a free one if 0 was given.

        Raises:
            OSError: The port is in use.
        """
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), self._accept, loop=loop)

        self._listener = socket.create_server((self._host, port))
        self._listener.setblocking(False)
        self._accepting = AcceptLoop(self._listener, make_protocol)
        found: int = self._listener.getsockname()[1]
        return found

    async def close(self) -> None:
        """Stop listening, and close open connections."""
        if self._accepting is not None and self._listener is not None:
            self._accepting.close()
            await self._accepting.wait_closed()
            self._listener.close()
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
            pass  # one side has closed; the other sees the end of its connection
        finally:
            for one in (writer, server[1]):
                one.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Return a connection to the next server that accepts one."""
        for _ in self._ports:
            port = self._ports[self._next % len(self._ports)]
            self._next += 1
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(self._host, port), _CONNECT_S)
        return None


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of the stream, and forward the end."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
