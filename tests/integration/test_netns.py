"""The hosts that partition tests stand on: what they reach, and what a pulled or a slow cable does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from support.netns import Host, hosts


@pytest.fixture
def pair() -> Iterator[tuple[Host, ...]]:
    with hosts(2) as made:
        yield made


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


def receive(far: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = far.recv(min(num_bytes, 65536))
        assert part, "the connection ended"
        num_bytes -= len(part)


def test_hosts_reach_each_other_and_nobody_else(pair: tuple[Host, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        address = outside.getsockname()
        with connected(pair) as (near, far):
            near.sendall(b"hello")
            receive(far, 5)
        with pair[0].entered(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        socket.create_connection(address, timeout=5).close()


def test_threads_are_where_they_were_started(pair: tuple[Host, ...]) -> None:
    seen = []

    def look() -> None:
        seen.append([name for _, name in socket.if_nameindex()])

    with pair[0].entered():
        inside = threading.Thread(target=look)
        inside.start()
    outside = threading.Thread(target=look)
    inside.join()
    outside.start()
    outside.join()
    assert "eth0" in seen[0]
    assert seen[1] == [name for _, name in socket.if_nameindex()]


def test_pulled_cable_says_nothing_and_what_was_sent_comes_when_it_is_back(pair: tuple[Host, ...]) -> None:
    with connected(pair) as (near, far):
        pair[1].unplug()
        near.sendall(b"hello")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(5)
        with pair[0].entered(), pytest.raises(TimeoutError):
            socket.create_connection((pair[1].address, 9), timeout=0.2)
        pair[1].plug_in()
        far.settimeout(5)
        receive(far, 5)


def test_slow_cable_is_as_slow_as_it_says(pair: tuple[Host, ...]) -> None:
    num_bytes = 200_000
    with connected(pair) as (near, far):
        pair[1].slow_down("8mbit")
        before, start_s = pair[1].num_received(), time.monotonic()
        sender = threading.Thread(target=near.sendall, args=(bytes(num_bytes),))
        sender.start()
        receive(far, num_bytes)
        sender.join()
        assert time.monotonic() - start_s > 0.8 * (num_bytes - 16384) / 1e6
        assert pair[1].num_received() - before >= num_bytes
        pair[1].set_quick()
        near.sendall(b"hello")
        receive(far, 5)
