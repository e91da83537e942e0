from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.kv.redis_server import running_redis
from trencadis.errors import ConfigError, ConfigValueError
from trencadis_kv.connectors.redis.config import RedisAddress, RedisConfig, without_password
from trencadis_kv.connectors.redis.connector import RedisControl, advice, redis_stores
from trencadis_kv.connectors.redis.link import Credentials, RedisLink, Timeouts
from trencadis_kv.connectors.redis.resp import ProtocolError, ReplyReader, ServerError, command, set_command

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


def wire(stream: bytes, splits: Sequence[int]) -> Callable[[Sequence[memoryview]], int]:
    """Return what receives a stream, no further than the next split at a time."""
    ends = sorted({split for split in splits if 0 < split < len(stream)} | {len(stream)})
    at = 0

    def receive(buffers: Sequence[memoryview]) -> int:
        nonlocal at
        limit = next((end for end in ends if end > at), at)
        start = at
        for buffer in buffers:
            num_bytes = min(len(buffer), limit - at)
            buffer[:num_bytes] = stream[at : at + num_bytes]
            at += num_bytes
        return at - start

    return receive


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def read_all(stream: bytes, splits: Sequence[int], kinds: Sequence[object]) -> list[object]:
    """Return all replies of a stream: of a bulk string what was written into 300 bytes of dots."""
    reader = ReplyReader(wire(stream, splits))
    found: list[object] = []
    for kind in kinds:
        try:
            if isinstance(kind, str):
                found.append(reader.read_status())
            elif isinstance(kind, int):
                found.append(reader.read_integer())
            elif isinstance(kind, Exception):
                reader.read_status()
            else:
                target = bytearray(b"." * 300)
                num_bytes = reader.read_bulk_into(memoryview(target))
                assert set(target[max(num_bytes, 0) :]) <= {ord(".")}, "more was written than there was"
                found.append(bytes(target[:num_bytes]) if num_bytes >= 0 else None)
        except ServerError as error:
            found.append(str(error))
    assert reader.num_buffered == 0
    return found


replies = st.lists(
    st.one_of(
        st.sampled_from(["OK", "PONG", ""]),
        st.integers(-(2**63), 2**63 - 1),
        st.sampled_from([RuntimeError("OOM command not allowed")]),
        st.none(),
        st.binary(max_size=400),
        st.sampled_from([b"\r\n", b"$3\r\nabc\r\n", b"x" * 299 + b"\r", b"y" * 300, b"z" * 301]),
    ),
    min_size=1,
    max_size=8,
)


@given(replies=replies, splits=st.lists(st.integers(1, 3000), max_size=40))
@settings(max_examples=200, phases=[Phase.explicit, Phase.generate])
def test_replies_are_the_same_however_they_were_split(replies: list[object], splits: list[int]) -> None:
    stream, expected = b"", []
    for reply in replies:
        if isinstance(reply, str):
            stream += b"+%b\r\n" % reply.encode()
        elif isinstance(reply, int):
            stream += b":%d\r\n" % reply
        elif isinstance(reply, Exception):
            stream += b"-%b\r\n" % str(reply).encode()
        else:
            stream += bulk(reply)  # type: ignore[arg-type]
        if isinstance(reply, bytes) and len(reply) > 300:
            expected.append(None)
        else:
            expected.append(str(reply) if isinstance(reply, Exception) else reply)
    assert read_all(stream, splits, replies) == expected


def test_payload_goes_straight_to_its_target() -> None:
    lengths: list[list[int]] = []
    receive = wire(bulk(bytes(10_000)) + bulk(bytes(10_000)), [])

    def watch(buffers: Sequence[memoryview]) -> int:
        lengths.append([len(buffer) for buffer in buffers])
        return receive(buffers)

    reader = ReplyReader(watch)
    for _ in range(2):
        assert reader.read_bulk_into(memoryview(bytearray(10_000))) == 10_000
    # The first call reads into the line buffer; the others into the target, and a few bytes beyond it.
    assert lengths[1:] == [[10_000 - 4096 + len("$10000\r\n"), 64], [10_000 - 64 + 2 + len("$10000\r\n"), 64]]


def test_value_longer_than_its_target_is_skipped_and_touches_nothing() -> None:
    reader = ReplyReader(wire(bulk(b"x" * 100_000) + bulk(b"good"), []))
    target = bytearray(b"." * 4)
    assert reader.read_bulk_into(memoryview(target)) == -1
    assert target == b"...."
    assert reader.read_bulk_into(memoryview(target)) == 4
    assert target == b"good"


def test_what_is_no_bulk_string_is_refused() -> None:
    lengths = [b"x", b"", b"1_0", b" 3", b"-2", b"99999999999999999999999", b"536870913"]
    streams = [b"$%b\r\n" % length for length in lengths]
    streams += [
        b"$5\r\nabcdefgh\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b":3\r\n",
        b"\r\n",
        b"x" * 5000,
    ]
    for stream in streams:
        with pytest.raises(ProtocolError):
            ReplyReader(wire(stream, [])).read_bulk_into(memoryview(bytearray(600)))


def test_connection_that_ends_in_the_middle_and_an_answer_that_is_an_error_are_told_apart() -> None:
    for stream in (b"", b"$", b"$3\r", b"$3\r\n", b"$3\r\nab", b"$3\r\nabc", b"$3\r\nabc\r"):
        with pytest.raises(ConnectionError, match="ended"):
            ReplyReader(wire(stream, [])).read_bulk_into(memoryview(bytearray(9)))
    with pytest.raises(ServerError, match="OOM command") as caught:
        ReplyReader(wire(b"-OOM command not allowed\r\n", [])).read_integer()
    assert caught.value.code == "OOM"


def test_commands_are_arrays_of_bulk_strings_and_set_hands_the_payload_on_as_it_is() -> None:
    assert command(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    pieces = [memoryview(b"header"), memoryview(b"payload")]
    parts = list(set_command(b"k", pieces))
    assert b"".join(parts) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$13\r\nheaderpayload\r\n"
    assert [part for part in parts if isinstance(part, memoryview)] == pieces
    parts = list(set_command(b"k", [memoryview(b"v")], ttl_s=90))
    assert b"".join(parts) == b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n$2\r\nEX\r\n$2\r\n90\r\n"


GOOD = {"maxmemory": 2**30, "maxmemory_policy": "allkeys-lfu", "role": "master", "redis_mode": "standalone"}


def test_each_thing_that_could_be_better_is_said_once_and_nothing_else() -> None:
    for change, says in (
        ({"maxmemory": 0}, "no maxmemory"),
        ({"maxmemory_policy": "noeviction"}, "keeps nothing new once it is full"),
        ({"maxmemory_policy": "volatile-lfu"}, "keeps nothing new once it is full"),
        ({"maxmemory_policy": "allkeys-lru"}, "set maxmemory-policy allkeys-lfu"),
        ({"role": "slave"}, "replica"),
        ({"redis_mode": "cluster"}, "cluster"),
        ({"aof_enabled": 1}, "append-only"),
    ):
        (text,) = advice(GOOD | change)
        assert says in text
    assert advice(GOOD) == advice({}) == advice(GOOD | {"maxmemory_policy": "volatile-lfu"}, ttl_s=60) == []


def test_real_server_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis(maxmemory_policy="noeviction", requirepass="word") as server:
        control = RedisControl(RedisConfig(url=server.url, password="word"))
        with caplog.at_level(logging.INFO, "trencadis.kv.redis"):
            control.look()
            control.look()
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert server.url in caplog.text
    assert "policy noeviction" in caplog.text
    assert "word" not in caplog.text


def test_unix_socket_is_looked_at_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as server, caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        RedisControl(RedisConfig(url=f"unix://{server.socket_path}")).look()
    assert "policy allkeys-lfu" in caplog.text


def test_server_that_does_not_tell_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as server, caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        server.run("ACL", "SETUSER", "default", "-info")
        RedisControl(RedisConfig(url=server.url)).look()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "does not tell" in caplog.text


def test_password_in_the_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.password") as caught:
        redis_stores(RedisConfig(url="redis://me:hunter2@host"))
    assert "hunter2" not in str(caught.value)


def test_missing_package_says_which_extra_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'pip install "trencadis\[redis\]"'):
        redis_stores(RedisConfig())


def test_file_of_certificates_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = RedisConfig(url="rediss://127.0.0.1", tls_ca_path=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.tls_ca_path = .*ca\.pem"):
        redis_stores(config)


def test_url_names_an_address_that_reads_like_it() -> None:
    for url, address in (
        ("redis://host", RedisAddress(host="host")),
        ("redis://host:7000/3", RedisAddress(host="host", port=7000, database=3)),
        ("rediss://cache.example:6380", RedisAddress(host="cache.example", port=6380, tls=True)),
        ("valkey://10.0.0.1", RedisAddress(host="10.0.0.1")),
        ("valkeys://10.0.0.1", RedisAddress(host="10.0.0.1", tls=True)),
        ("redis://kv@[::1]:6379", RedisAddress(host="::1", user="kv")),
        ("redis://a%40b@host", RedisAddress(host="host", user="a@b")),
        ("unix:///run/redis.sock", RedisAddress(path="/run/redis.sock")),
        ("unix://kv@/run/redis.sock?db=2", RedisAddress(path="/run/redis.sock", user="kv", database=2)),
    ):
        assert RedisAddress.parse(url) == address
    for url in ("redis://host:7000/3", "rediss://h:1", "redis://[::1]:6379", "unix:///s"):
        assert str(RedisAddress.parse(url)) == url


def test_what_is_no_address_is_refused_in_words() -> None:
    for url, reason in (
        ("http://host", "must begin with redis://"),
        ("127.0.0.1:6379", "must begin with redis://"),
        ("", "must begin with redis://"),
        ("redis://", "must name a host"),
        ("redis://host:0", "1 .. 65535"),
        ("redis://host:99999", "[Pp]ort"),
        ("redis://host/first", "number of a database"),
        ("unix://relative.sock", "absolute path"),
        ("unix:///s?db=x", "number of a database"),
    ):
        with pytest.raises(ValueError, match=reason):
            RedisConfig(url=url)


def test_password_is_never_shown() -> None:
    for url, shown in (
        ("redis://me:hunter2@host", "redis://me:***@host"),
        ("redis://:host@host", "redis://:***@host"),
        ("unix://me:a%3Ab@/s", "unix://me:***@/s"),
        ("redis://me@host", "redis://me@host"),
        ("redis://me:@host", "redis://me:@host"),
    ):
        assert without_password(url) == shown
        assert "hunter2" not in repr(RedisAddress.parse(url))
    assert attrs.fields(RedisConfig).password.metadata["secret"]
