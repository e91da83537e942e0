from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trencadis_kv.connectors.redis.config import RedisAddress
from trencadis_kv.connectors.redis.link import Credentials, RedisLink, Timeouts
from trencadis_kv.connectors.redis.resp import ServerError, command
from trencadis_kv.wire.socket_buffers import set_buffer

Serve = Callable[[socket.socket], None]
SIGN_IN = command(b"PING")


@pytest.fixture
def link_to(tmp_path: Path) -> Iterator[Callable[..., RedisLink]]:
    """``link_to(serve)`` returns a link to a unix socket where ``serve`` is called with the other end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    threads, links = [], []

    def make(serve: Serve, *, io_s: float = 10.0, **credentials: str) -> RedisLink:
        def run() -> None:
            there, _ = listener.accept()
            with there, contextlib.suppress(OSError):  # the link may end it with something unread
                serve(there)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        address = RedisAddress(path=str(tmp_path / "s"))
        links.append(RedisLink(address, Credentials(**credentials), Timeouts(connect_s=10.0, io_s=io_s)))
        return links[-1]

    yield make
    for link in links:
        link.close()
    for thread in threads:
        thread.join(60)
    listener.close()


def take(there: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes; fewer if the other side ends."""
    parts = []
    while num_bytes and (part := there.recv(min(num_bytes, 65536))):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def welcome(there: socket.socket) -> None:
    assert take(there, len(SIGN_IN)) == SIGN_IN
    there.sendall(b"+PONG\r\n")


@contextlib.contextmanager
def welcoming(listener: socket.socket) -> Iterator[None]:
    """Welcome one client."""

    def serve() -> None:
        there, _ = listener.accept()
        with there:
            welcome(there)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(60)


def test_connection_holds_as_much_as_the_kernel_allows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as wide:
        set_buffer(wide, "receive")
        address = RedisAddress(host="127.0.0.1", port=listener.getsockname()[1])
        link = RedisLink(address, Credentials(), Timeouts(connect_s=10.0, io_s=10.0))
        with welcoming(listener):
            link.open()
            sizes = [one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for one in (link._connection(), wide)]
            link.close()
    assert sizes[0] >= sizes[1]


@pytest.mark.parametrize(
    ("credentials", "first"),
    [
        ({}, b""),
        ({"password": "p w"}, command(b"AUTH", b"p w")),
        ({"user": "kv", "password": "p"}, command(b"AUTH", b"kv", b"p")),
        ({"user": "kv"}, command(b"AUTH", b"kv", b"")),
    ],
)
def test_who_we_are_is_shown_first(
    link_to: Callable[..., RedisLink], credentials: dict[str, str], first: bytes
) -> None:
    seen = []

    def serve(there: socket.socket) -> None:
        seen.append(take(there, len(first + SIGN_IN)))
        there.sendall(b"+OK\r\n+PONG\r\n" if first else b"+PONG\r\n")

    link_to(serve, **credentials).open()
    assert seen == [first + SIGN_IN]


def test_server_that_wants_no_such_client_says_why(link_to: Callable[..., RedisLink]) -> None:
    def serve(there: socket.socket) -> None:
        take(there, len(SIGN_IN))
        there.sendall(b"-NOAUTH Authentication required.\r\n")

    with pytest.raises(ServerError, match="NOAUTH"):
        link_to(serve).open()


def test_everything_is_sent_in_order_however_little_the_kernel_takes(link_to: Callable[..., RedisLink]) -> None:
    pieces = [bytes([number % 251]) * (number * 37 % 5000) for number in range(3000)]
    seen = []

    def serve(there: socket.socket) -> None:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        welcome(there)
        seen.append(take(there, sum(map(len, pieces))))
        there.sendall(b"+OK\r\n")

    link = link_to(serve)
    link.open()
    link.send(memoryview(piece) for piece in pieces)
    link.reader.read_status()
    assert seen == [b"".join(pieces)]


def test_link_is_quiet_until_something_unasked_for_comes(link_to: Callable[..., RedisLink]) -> None:
    go, said = threading.Event(), threading.Event()

    def serve(there: socket.socket) -> None:
        welcome(there)
        assert go.wait(60)
        there.sendall(b"+late\r\n")
        said.set()
        there.recv(1)

    link = link_to(serve)
    assert not link.is_quiet(), "it is not open yet"
    link.open()
    assert link.is_quiet()
    go.set()
    assert said.wait(60)
    assert not link.is_quiet()


def test_link_with_an_unread_reply_is_not_quiet(link_to: Callable[..., RedisLink]) -> None:
    """Two replies that come together: the second is in our buffer, not in the kernel's."""

    def serve(there: socket.socket) -> None:
        take(there, len(SIGN_IN))
        there.sendall(b"+PONG\r\n+more\r\n")
        there.recv(1)

    link = link_to(serve)
    link.open()
    assert not link.is_quiet()


def test_link_whose_other_end_is_gone_is_not_quiet(link_to: Callable[..., RedisLink]) -> None:
    gone = threading.Event()

    def serve(there: socket.socket) -> None:
        welcome(there)
        there.shutdown(socket.SHUT_RDWR)
        gone.set()

    link = link_to(serve)
    link.open()
    assert gone.wait(60)
    assert not link.is_quiet()


def test_server_that_takes_nothing_is_given_up(link_to: Callable[..., RedisLink]) -> None:
    done = threading.Event()

    def serve(there: socket.socket) -> None:
        welcome(there)
        assert done.wait(60)

    link = link_to(serve, io_s=0.1)
    link.open()
    with pytest.raises(TimeoutError):
        link.send([bytes(50_000_000)])
    done.set()


def test_link_that_was_interrupted_before_it_was_opened_does_not_open(link_to: Callable[..., RedisLink]) -> None:
    link = link_to(lambda there: None)
    link.interrupt()
    with pytest.raises(ConnectionAbortedError):
        link.open()
    with socket.socket(socket.AF_UNIX) as other:  # the listener of this test waits for somebody
        other.connect(link._address.path)


def test_closed_link_sends_nothing(link_to: Callable[..., RedisLink]) -> None:
    link = link_to(welcome)
    link.open()
    link.close()
    link.close()
    with pytest.raises(ConnectionAbortedError):
        link.send([b"x"])


def test_second_address_of_a_name_is_tried_when_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as unused:
        port, refused = listener.getsockname()[1], unused.getsockname()[1]
        unused.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in (refused, port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        link = RedisLink(RedisAddress(host="two.example"), Credentials(), Timeouts(connect_s=5, io_s=5))
        with welcoming(listener):
            link.open()
            link.close()


def test_nobody_listening_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        RedisLink(RedisAddress(host="127.0.0.1", port=port), Credentials(), Timeouts(connect_s=5, io_s=5)).open()
