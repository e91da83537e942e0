"""The proxy that fault tests stand on does what it says, to the byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from support.faultproxy import FaultProxy

BYTES = bytes(range(256)) * 1000


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[FaultProxy]:
    """A proxy before a server that sends everything back."""
    threads: list[threading.Thread] = []

    def serve(there: socket.socket) -> None:
        with there, contextlib.suppress(OSError):
            while data := there.recv(65536):
                there.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    with FaultProxy(listener.getsockname()[1]) as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connect(proxy) as client:
        yield client


def sent_and_received(client: socket.socket, data: bytes, num_bytes: int | None = None) -> bytes:
    """Return what comes back for some bytes, up to as many, or until the connection ends."""
    send(client, data)
    parts, left = [], len(data) if num_bytes is None else num_bytes
    with contextlib.suppress(ConnectionError):
        while left and (part := client.recv(min(left, 65536))):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def send(client: socket.socket, data: bytes) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):
            client.sendall(data)

    threading.Thread(target=run).start()


def test_without_faults_bytes_pass_unchanged(proxy: FaultProxy, client: socket.socket) -> None:
    assert sent_and_received(client, BYTES) == BYTES
    assert (proxy.to_server.num_bytes, proxy.to_client.num_bytes) == (len(BYTES), len(BYTES))
    assert proxy.num_connections == 1
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


@pytest.mark.parametrize("at", [0, 70_000, len(BYTES) - 1])
def test_flip_changes_the_lowest_bit_of_one_byte(proxy: FaultProxy, client: socket.socket, at: int) -> None:
    proxy.to_client.set(flip_at=at)
    expected = bytearray(BYTES)
    expected[at] ^= 1
    assert sent_and_received(client, BYTES) == expected
    assert proxy.to_client.happened.is_set()
    assert sent_and_received(client, BYTES) == BYTES, "a flip happens once"


@pytest.mark.parametrize("at", [0, 1, 70_000])
@pytest.mark.parametrize("way", ["to_client", "to_server"])
def test_cut_passes_exactly_so_many_bytes(proxy: FaultProxy, client: socket.socket, at: int, way: str) -> None:
    getattr(proxy, way).set(cut_at=at)
    received = sent_and_received(client, BYTES)
    assert received == BYTES[: len(received)]
    assert len(received) <= at == getattr(proxy, way).num_bytes
    with connect(proxy) as again:
        assert sent_and_received(again, BYTES) == BYTES, "a cut happens once"


@pytest.mark.parametrize("at", [0, 5, 70_000])
def test_stall_holds_the_rest_until_it_is_lifted(proxy: FaultProxy, client: socket.socket, at: int) -> None:
    proxy.to_client.set(stall_at=at)
    first = sent_and_received(client, BYTES, at)
    assert proxy.to_client.happened.wait(60)
    client.settimeout(0.02)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(10)
    proxy.set_passing()
    assert first + sent_and_received(client, b"", len(BYTES) - at) == BYTES


def test_delay_and_rate_take_their_time_and_all_connections_can_be_cut_at_once(
    proxy: FaultProxy, client: socket.socket
) -> None:
    for faults, data, least_s in (({"delay_s": 0.03}, b"x", 0.03), ({"bytes_per_s": 1e6}, BYTES[:50_000], 0.05)):
        proxy.to_client.set(**faults)
        start = time.perf_counter()
        assert sent_and_received(client, data) == data
        assert time.perf_counter() - start >= least_s
    proxy.cut()
    assert sent_and_received(client, b"more") == b""


def test_server_that_is_away_or_resets_looks_so_through_the_proxy(listener: socket.socket) -> None:
    with FaultProxy(listener.getsockname()[1]) as proxy, connect(proxy) as client:
        there, _ = listener.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
        listener.close()
        with connect(proxy) as other:
            assert sent_and_received(other, b"anybody?", 8) == b""


def test_proxy_ends_while_it_holds_something_up(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.to_client.set(stall_at=0)
    proxy.to_server.set(delay_s=0.001)
    client.sendall(b"x")
    assert proxy.to_client.happened.wait(60)
