"""The hosts that partition tests stand on: what they reach, and what a pulled or a slow cable does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from support.netns import Host, hosts


@contextlib.contextmanager
def connected(pair: tuple[Host, ...]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Have a connection from the first host to the second."""
    with pair[1].entered():
        listener = socket.create_server((pair[1].address, 0))
    with listener:
        with pair[0].entered():
            near = socket.create_connection(listener.getsockname(), timeout=5)
        far, _ = listener.accept()
    with near, far:
        far.settimeout(5)
        yield near, far


def test_hosts_reach_each_other_and_nobody_else_and_cables_do_what_they_are_told() -> None:
    with hosts(2) as pair, socket.create_server(("127.0.0.1", 0)) as outside, connected(pair) as (near, far):
        near.sendall(b"hello")
        assert far.makefile("rb").read(5) == b"hello"
        with pair[0].entered(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(outside.getsockname(), timeout=5)
        socket.create_connection(outside.getsockname(), timeout=5).close()

        # A pulled one says nothing, and what was sent comes when it is back.
        pair[1].unplug()
        near.sendall(b"again")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(5)
        with pair[0].entered(), pytest.raises(TimeoutError):
            socket.create_connection((pair[1].address, 9), timeout=0.2)
        pair[1].plug_in()
        far.settimeout(5)
        assert far.makefile("rb").read(5) == b"again"

        # A slow one is as slow as it says.
        num_bytes = 200_000
        pair[1].slow_down("8mbit")
        before, start_s = pair[1].num_received(), time.monotonic()
        sender = threading.Thread(target=near.sendall, args=(bytes(num_bytes),))
        sender.start()
        assert len(far.makefile("rb").read(num_bytes)) == num_bytes
        sender.join()
        assert time.monotonic() - start_s > 0.8 * (num_bytes - 16384) / 1e6
        assert pair[1].num_received() - before >= num_bytes
        pair[1].set_quick()


def test_threads_are_where_they_were_started() -> None:
    seen: list[list[str]] = []
    with hosts(1) as (host,):
        look = lambda: seen.append([name for _, name in socket.if_nameindex()])  # noqa: E731
        with host.entered():
            inside = threading.Thread(target=look)
            inside.start()
        inside.join()
    look()
    assert "eth0" in seen[0]
    assert seen[1] != seen[0]
