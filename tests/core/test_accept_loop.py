from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from trencadis import accept_loop
from trencadis.accept_loop import AcceptLoop
from trencadis_kv.cluster.forwarder import Forwarder
from trencadis_server.lifecycle.lifecycle import event_loop_factory


class Exhausted(socket.socket):
    """A listening socket of a process that is out of descriptors for a while."""

    num_failures_left = 3

    def accept(self):
        if self.num_failures_left:
            self.num_failures_left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Greeting(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


@pytest.mark.parametrize("loop_factory", [None, event_loop_factory()], ids=["asyncio", "fastest"])
def test_connections_are_accepted_after_a_shortage_of_descriptors_which_the_log_says_once(
    loop_factory, monkeypatch, caplog
):
    monkeypatch.setattr(accept_loop, "_PAUSE_S", 0.01)
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)

    async def main():
        accepting = AcceptLoop(listener, Greeting)
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await asyncio.wait_for(reader.read(), 20) == b"hello"
            writer.close()
        accepting.close()
        await accepting.wait_closed()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    listener.close()
    (line,) = [record.message for record in caplog.records if record.name == "trencadis.server"]
    assert "Too many open files" in line
    assert "ulimit -n" in line


def test_a_cluster_forwards_after_a_shortage_of_descriptors(monkeypatch, caplog):
    def exhausted(address):
        listener = Exhausted()
        listener.bind(address)
        listener.listen()
        return listener

    async def main():
        server = await asyncio.get_running_loop().create_server(Greeting, "127.0.0.1", 0)
        forwarder = Forwarder("127.0.0.1", [server.sockets[0].getsockname()[1]])
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_server", exhausted)
            port = await forwarder.start(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 20) == b"hello"
        writer.close()
        await forwarder.close()
        server.close()

    monkeypatch.setattr(accept_loop, "_PAUSE_S", 0.01)
    asyncio.run(main())
    assert len([record for record in caplog.records if record.name == "trencadis.server"]) == 1
