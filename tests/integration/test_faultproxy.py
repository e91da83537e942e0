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


class Echo:
    """A server that sends everything back."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.received = 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                there, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._serve, args=(there,)))
            self.threads[-1].start()

    def _serve(self, there: socket.socket) -> None:
        with there:
            try:
                while data := there.recv(65536):
                    self.received += len(data)
                    there.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join(60)
        self.listener.close()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        yield client


def sent_and_received(client: socket.socket, data: bytes) -> bytes:
    """Return what comes back for some bytes, up to as many, or until the connection ends."""
    threading.Thread(target=_send, args=(client, data)).start()
    parts, left = [], len(data)
    try:
        while left and (part := client.recv(65536)):
            parts.append(part)
            left -= len(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def _send(client: socket.socket, data: bytes) -> None:
    try:
        client.sendall(data)
    except OSError:
        return


def test_without_faults_bytes_pass_unchanged(proxy: FaultProxy, client: socket.socket) -> None:
    assert sent_and_received(client, BYTES) == BYTES
    assert (proxy.to_server.num_bytes, proxy.to_client.num_bytes) == (len(BYTES), len(BYTES))


def test_half_closed_connection_still_brings_the_answer(client: socket.socket) -> None:
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert client.makefile("rb").read() == b"last words"


@pytest.mark.parametrize("at", [0, 1, 70_000, len(BYTES) - 1])
def test_flip_changes_the_lowest_bit_of_one_byte(proxy: FaultProxy, client: socket.socket, at: int) -> None:
    proxy.to_client.set(flip_at=at)
    expected = bytearray(BYTES)
    expected[at] ^= 1
    assert sent_and_received(client, BYTES) == expected
    assert proxy.to_client.happened.is_set()
    assert sent_and_received(client, BYTES) == BYTES, "a flip happens once"


@pytest.mark.parametrize("at", [0, 1, 70_000])
def test_cut_passes_exactly_so_many_bytes(proxy: FaultProxy, client: socket.socket, at: int) -> None:
    proxy.to_client.set(cut_at=at)
    received = sent_and_received(client, BYTES)
    assert received == BYTES[: len(received)]
    assert proxy.to_client.num_bytes == at
    assert len(received) <= at
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as again:
        assert sent_and_received(again, BYTES) == BYTES, "a cut happens once"


def test_cut_on_the_way_there_hides_the_rest_from_the_server(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.to_server.set(cut_at=1000)
    assert len(sent_and_received(client, BYTES)) <= 1000
    assert echo.received <= 1000


@pytest.mark.parametrize("at", [0, 5, 70_000])
def test_stall_holds_the_rest_until_it_is_lifted(proxy: FaultProxy, client: socket.socket, at: int) -> None:
    proxy.to_client.set(stall_at=at)
    threading.Thread(target=_send, args=(client, BYTES)).start()
    assert proxy.to_client.happened.wait(60)
    first = b""
    while len(first) < at:
        first += client.recv(at - len(first))
    client.settimeout(0.02)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(10)
    proxy.set_passing()
    rest = b""
    while len(rest) < len(BYTES) - at:
        rest += client.recv(65536)
    assert first + rest == BYTES


def test_delay_and_rate_take_their_time(proxy: FaultProxy, client: socket.socket) -> None:
    start = time.perf_counter()
    sent_and_received(client, b"x")
    proxy.to_client.set(delay_s=0.03)
    assert sent_and_received(client, b"x") == b"x"
    assert time.perf_counter() - start >= 0.03
    start = time.perf_counter()
    proxy.to_server.set(bytes_per_s=1e6)
    proxy.to_client.set()
    assert sent_and_received(client, BYTES[:50_000]) == BYTES[:50_000]
    assert time.perf_counter() - start >= 0.05


def test_all_connections_can_be_cut_at_once(proxy: FaultProxy, client: socket.socket) -> None:
    assert sent_and_received(client, b"hello") == b"hello"
    proxy.cut()
    assert sent_and_received(client, b"more") == b""
    assert proxy.num_connections == 1


def test_server_that_is_away_looks_away_through_the_proxy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with FaultProxy(port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        assert sent_and_received(client, b"anybody?") == b""


def test_reset_of_the_server_reaches_the_client() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultProxy(listener.getsockname()[1]) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
    ):
        there, _ = listener.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


def test_proxy_ends_while_it_holds_something_up(echo: Echo) -> None:
    with FaultProxy(echo.port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        proxy.to_client.set(stall_at=0)
        proxy.to_server.set(delay_s=0.001)
        client.sendall(b"x")
        assert proxy.to_client.happened.wait(60)
