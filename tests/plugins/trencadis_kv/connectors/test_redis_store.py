"""Blocks in a Redis server, and its failures as transfer errors."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.faultproxy import FaultProxy
from support.kv.redis_server import RedisServer, running_redis
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.config import RedisAddress, RedisConfig
from trencadis_kv.connectors.redis.connector import redis_stores
from trencadis_kv.connectors.redis.resp import ProtocolError, ServerError
from trencadis_kv.connectors.redis.store import RedisStore, transfer_error

ADDRESS = RedisAddress(host="there")


@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", TransferCause.FULL, "allkeys-lfu"),
        ("WRONGPASS invalid username-password pair", TransferCause.UNREACHABLE, "kv_connector.redis.password"),
        ("NOAUTH Authentication required.", TransferCause.UNREACHABLE, "kv_connector.redis.password"),
        ("NOPERM this user has no permissions", TransferCause.UNREACHABLE, "needs ping"),
        ("READONLY You can't write against a read only replica.", TransferCause.UNREACHABLE, "primary"),
        ("MASTERDOWN Link with MASTER is down", TransferCause.UNREACHABLE, "primary"),
        ("LOADING Redis is loading the dataset in memory", TransferCause.UNREACHABLE, "LOADING"),
        ("MISCONF Redis is configured to save RDB snapshots", TransferCause.UNREACHABLE, "save ''"),
        ("MOVED 3999 127.0.0.1:6381", TransferCause.UNREACHABLE, "cluster"),
        ("ERR max number of clients reached", TransferCause.UNREACHABLE, "max number"),
        ("ERR unknown command 'UNLINK'", TransferCause.RAISED, "unknown command"),
    ],
)
def test_answer_of_the_server_becomes_a_cause_and_a_remedy(text: str, cause: TransferCause, says: str) -> None:
    error = transfer_error(ServerError(text), ADDRESS)
    assert error.cause == cause
    assert says in str(error)
    assert str(ADDRESS) in str(error)


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (TimeoutError("timed out"), TransferCause.DEADLINE),
        (ConnectionRefusedError("refused"), TransferCause.UNREACHABLE),
        (ConnectionError("the server ended the connection"), TransferCause.UNREACHABLE),
        (ssl.SSLCertVerificationError("self-signed certificate"), TransferCause.UNREACHABLE),
        (ProtocolError("b'X' is no number"), TransferCause.CORRUPT),
    ],
)
def test_fault_of_the_connection_becomes_a_cause(raised: Exception, cause: TransferCause) -> None:
    assert transfer_error(raised, ADDRESS).cause == cause


def test_end_that_we_made_ourselves_is_no_fault_of_the_server() -> None:
    assert transfer_error(OSError("bad"), ADDRESS, is_interrupted=True).cause == TransferCause.CANCELLED


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    shared.run("FLUSHALL")
    return shared


@pytest.fixture
def store_at() -> Iterator[Callable[..., RedisStore]]:
    with stores() as make:
        yield make


# ------------------------------------------------------------------------------------------------ what works
@pytest.mark.parametrize("door", ["tcp", "unix"])
def test_what_was_put_is_got(server: RedisServer, store_at: Callable[..., RedisStore], door: str) -> None:
    url = server.url if door == "tcp" else f"unix://{server.socket_path}"
    store, todo = store_at(server, url=url), objects(40)
    assert store.put(keys(40), todo) == 40
    assert read(store, 40) == [whole(pieces) for pieces in todo]
    assert server.run("GET", keys(40)[7]) == whole(todo[7])


def test_thousands_of_small_objects_go_through_the_windows(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    store, todo = store_at(server), objects(1500, 20)
    assert store.put(keys(1500), todo) == 1500
    assert read(store, 1500, 20) == [whole(pieces) for pieces in todo]
    assert store.contains(keys(1500)) == 1500


def test_object_longer_than_its_target_counts_as_not_there(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    store, todo = store_at(server), objects(3)
    store.put(keys(3), todo)
    server.run("APPEND", keys(3)[1], "x")
    assert read(store, 3) == [whole(todo[0]), None, whole(todo[2])]


def test_key_of_another_type_counts_as_not_there(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store, todo = store_at(server), objects(2)
    store.put(keys(2), todo)
    server.run("DEL", keys(2)[0])
    server.run("LPUSH", keys(2)[0], "a list")
    assert read(store, 2) == [None, whole(todo[1])]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 16, 17, 130])
def test_contains_counts_leading_keys_for_every_gap(
    server: RedisServer, store_at: Callable[..., RedisStore], count: int
) -> None:
    store = store_at(server)
    store.put(keys(count), objects(count, 20))
    assert store.contains(keys(count)) == count
    for gap in {0, 1, count // 2, count - 2, count - 1} & set(range(count)):
        server.run("DEL", keys(count)[gap])
        assert store.contains(keys(count)) == gap
        server.run("SET", keys(count)[gap], "back")


def test_deleted_objects_are_gone_and_others_stay(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store = store_at(server)
    store.put(keys(300), objects(300, 20))
    store.delete(keys(300)[1:])
    store.delete(keys(300)[1:])
    store.delete([])
    assert server.run("DBSIZE") == 1
    assert store.contains(keys(300)) == 1


def test_time_to_live_is_the_servers(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store_at(server, ttl_s=90).put(keys(1), objects(1))
    assert 80 <= server.run("TTL", keys(1)[0]) <= 90
    store_at(server).put(keys(1), objects(1))
    assert server.run("TTL", keys(1)[0]) == -1


def test_database_of_the_url_is_selected(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store_at(server, url=f"{server.url}/3").put(keys(2), objects(2))
    assert store_at(server).contains(keys(2)) == 0
    assert server.run("INFO", "keyspace")["db3"]["keys"] == 2


def test_closed_store_has_no_connection_and_stays_closed(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    store = store_at(server)
    store.contains(keys(1))
    store.close()
    store.close()
    store.interrupt()
    with pytest.raises(TransferError) as caught:
        store.contains(keys(1))
    assert caught.value.cause == TransferCause.CANCELLED
    assert num_clients(server) == 0


# ------------------------------------------------------------------------------------------------- refusals
def test_wrong_password_is_unhealthy_in_words(store_at: Callable[..., RedisStore]) -> None:
    with running_redis(requirepass="right") as server:
        for password, word in (("wrong", "WRONGPASS"), ("", "NOAUTH")):
            with pytest.raises(TransferError, match=word) as caught:
                store_at(server, password=password).contains(keys(1))
            assert caught.value.cause == TransferCause.UNREACHABLE
            assert "kv_connector.redis.password" in str(caught.value)
        assert store_at(server, password="right").contains(keys(1)) == 0


def test_user_of_the_access_control_list_is_signed_in(store_at: Callable[..., RedisStore]) -> None:
    rules = "on >secret ~kv1/* +ping +select +get +set +exists +unlink"
    with running_redis() as server:
        server.run("ACL", "SETUSER", "kv", *rules.split())
        server.run("ACL", "SETUSER", "default", "off")
        store = store_at(server, url=f"redis://kv@127.0.0.1:{server.port}", password="secret")
        assert store.put(keys(2), objects(2)) == 2
        assert store.contains(keys(2)) == 2
        store.delete(keys(2))
        with pytest.raises(TransferError, match="NOPERM"):
            store.contains(["elsewhere"])


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    """A way to the empty server."""
    with FaultProxy(server.port) as proxy:
        yield proxy


# ----------------------------------------------------------------------------------------- a server that is full
def test_full_server_without_eviction_keeps_fewer(store_at: Callable[..., RedisStore]) -> None:
    with running_redis(maxmemory="3mb", maxmemory_policy="noeviction") as server:
        store, todo = store_at(server), objects(80)
        kept = store.put(keys(80), todo)
        assert 0 < kept < 80
        assert server.run("DBSIZE") == kept
        assert read(store, 80)[: kept // 2] == [whole(pieces) for pieces in todo[: kept // 2]]
        assert num_clients(server) == 1, "a full server is no reason to reconnect"
        assert store.put(keys(80)[-1:], todo[-1:]) == 0


# ------------------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_connection_cut_while_reading_is_an_error_and_the_next_call_works(
    server: RedisServer, proxy: FaultProxy, store_at: Callable[..., RedisStore], share: float
) -> None:
    store, todo = store_at(proxy), objects(8)
    store.put(keys(8), todo)
    before = proxy.num_connections
    proxy.to_client.set(cut_at=int(8 * BLOCK_BYTES * share))
    with pytest.raises(TransferError) as caught:
        read(store, 8)
    assert caught.value.cause == TransferCause.UNREACHABLE
    assert read(store, 8) == [whole(pieces) for pieces in todo]
    assert proxy.num_connections == before + 1


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_connection_cut_while_writing_leaves_only_whole_objects(
    server: RedisServer, proxy: FaultProxy, store_at: Callable[..., RedisStore], share: float
) -> None:
    store, todo = store_at(proxy), objects(8)
    store.contains(keys(1))
    proxy.to_server.set(cut_at=int(8 * BLOCK_BYTES * share))
    with pytest.raises(TransferError) as caught:
        store.put(keys(8), todo)
    assert caught.value.cause == TransferCause.UNREACHABLE
    found = read(store, 8)
    assert None in found
    assert all(value in {None, whole(todo[number])} for number, value in enumerate(found))
    assert store.put(keys(8), todo) == 8


def test_server_that_is_killed_is_unreachable_until_it_is_back(store_at: Callable[..., RedisStore]) -> None:
    with running_redis() as server:
        store = store_at(server)
        store.put(keys(2), objects(2))
        server.kill()
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                store.contains(keys(2))
            assert caught.value.cause == TransferCause.UNREACHABLE
            assert str(server.port) in str(caught.value)
        server.start()
        assert store.contains(keys(2)) == 0
        assert store.put(keys(2), objects(2)) == 2


def test_late_reply_is_never_taken_for_another_ones(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store, todo = store_at(server, io_timeout_s=0.1), objects(6)
    store.put(keys(6), todo)
    with server.stopped(), pytest.raises(TransferError) as caught:
        read(store, 3)
    assert caught.value.cause == TransferCause.DEADLINE
    targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(3)]
    assert list(store.get(keys(6)[3:], targets)) == [BLOCK_BYTES] * 3
    assert [bytes(target) for target in targets] == [whole(pieces) for pieces in todo[3:]]


def test_connection_with_a_reply_under_way_is_given_up_at_once(
    proxy: FaultProxy, store_at: Callable[..., RedisStore]
) -> None:
    """Although nothing of the late reply can be seen yet when the next call begins."""
    store = store_at(proxy, io_timeout_s=0.1)
    store.put(keys(1), objects(1))
    before = proxy.num_connections
    proxy.to_client.set(stall_at=0)
    for number in (1, 2):
        with pytest.raises(TransferError) as caught:
            store.contains(keys(number))
        assert caught.value.cause == TransferCause.DEADLINE
    assert proxy.num_connections == before + 1


def test_idle_connection_that_the_server_ended_is_made_again_without_an_error(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    store = store_at(server)
    store.put(keys(1), objects(1))
    assert server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") == 1
    assert store.contains(keys(1)) == 1


@pytest.mark.slow
def test_every_flipped_bit_of_a_frame_is_noticed_or_harmless(
    proxy: FaultProxy, store_at: Callable[..., RedisStore]
) -> None:
    """A reply that is damaged outside its payload never moves the border to the next one."""
    store, todo = store_at(proxy, io_timeout_s=0.15), objects(2, 20)
    store.put(keys(2), todo)
    frame = len("$20\r\n" + 20 * "x" + "\r\n")
    for at in [*range(5), *range(25, 32), *range(frame + 25, 2 * frame)]:
        proxy.to_client.set(flip_at=at)
        try:
            found = read(store, 2, 20)
        except TransferError:
            found = []
        assert all(value in {None, whole(todo[number])} for number, value in enumerate(found)), f"byte {at}"
        proxy.set_passing()
        assert read(store, 2, 20) == [whole(pieces) for pieces in todo], f"after byte {at}"


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_call_that_waits_can_be_ended_from_another_thread(
    proxy: FaultProxy, store_at: Callable[..., RedisStore], end: str
) -> None:
    store = store_at(proxy, io_timeout_s=30.0)
    store.put(keys(1), objects(1))
    proxy.to_client.set(stall_at=100)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, store, 1)
        assert proxy.to_client.happened.wait(60)
        getattr(store, end)()
        with pytest.raises(TransferError) as caught:
            reading.result(60)
    assert caught.value.cause == TransferCause.CANCELLED
    proxy.set_passing()
    if end == "interrupt":
        assert store.contains(keys(1)) == 1
    else:
        with pytest.raises(TransferError, match="closed"):
            store.contains(keys(1))


def test_connecting_can_be_ended_from_another_thread(store_at: Callable[..., RedisStore]) -> None:
    with running_redis() as server:
        store = store_at(server, io_timeout_s=30.0)
        with server.stopped(), ThreadPoolExecutor(1) as pool:
            asking = pool.submit(store.contains, keys(1))  # the kernel accepts; the sign-in waits
            while not asking.done():
                store.interrupt()
            with pytest.raises(TransferError) as caught:
                asking.result()
        assert caught.value.cause == TransferCause.CANCELLED


def test_interrupt_between_calls_is_harmless(proxy: FaultProxy, store_at: Callable[..., RedisStore]) -> None:
    store = store_at(proxy)
    store.interrupt()
    store.put(keys(1), objects(1))
    before = proxy.num_connections
    store.interrupt()
    assert store.contains(keys(1)) == 1
    assert proxy.num_connections == before, "the connection was lost"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, signed by itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture(scope="module")
def tls_server(certificates: Path) -> Iterator[RedisServer]:
    with running_redis(tls=certificates) as server:
        yield server


def test_what_was_put_is_got_through_tls_and_a_server_that_nobody_vouches_for_gets_nothing(
    tls_server: RedisServer, certificates: Path, store_at: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    todo = objects(40)
    with caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        store = store_at(tls_server, url=tls_server.url, tls_ca_path=str(certificates / "cert.pem"))
        assert store.put(keys(40), todo) == 40
    assert "policy allkeys-lfu" in caplog.text, "redis-py found no way in"
    assert read(store, 40) == [whole(pieces) for pieces in todo]
    assert store.contains([*keys(40), "kv1/none"]) == 40
    with pytest.raises(TransferError, match=r"kv_connector\.redis\.tls_ca_path") as caught:
        store_at(tls_server, url=tls_server.url).contains(keys(1))
    assert caught.value.cause == TransferCause.UNREACHABLE
    with pytest.raises(TransferError):
        store_at(tls_server, io_timeout_s=1.0).contains(keys(1))  # plain text


BLOCK_BYTES = 100_000


@contextlib.contextmanager
def stores() -> Iterator[Callable[..., RedisStore]]:
    """Give what makes stores at a server, or at a way to one; they are closed when the block ends."""
    made = []

    def make(where: RedisServer | FaultProxy, **options: Any) -> RedisStore:
        store = redis_stores(RedisConfig(**{"url": f"redis://127.0.0.1:{where.port}", **options}))()
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def keys(count: int) -> list[str]:
    return [f"kv1/default/{'ab' * 16}/0.0.0-8/{number:064x}" for number in range(count)]


def objects(count: int, num_bytes: int = BLOCK_BYTES) -> list[list[memoryview]]:
    """Return objects of three pieces, one of them empty, each of a content of its own. Pure."""
    pattern = bytes(range(256)) * (num_bytes // 256 + 2)
    return [
        [memoryview(b"%08d" % number), memoryview(b""), memoryview(pattern)[number : number + num_bytes - 8]]
        for number in range(count)
    ]


def whole(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


def num_clients(server: RedisServer) -> int:
    return len(server.run("CLIENT", "LIST", "TYPE", "normal").splitlines()) - 1


def read(store: RedisStore, count: int, num_bytes: int = BLOCK_BYTES) -> list[bytes | None]:
    targets = [memoryview(bytearray(num_bytes)) for _ in range(count)]
    sizes = store.get(keys(count), targets)
    assert len(sizes) == count
    return [bytes(target[:size]) if size >= 0 else None for target, size in zip(targets, sizes, strict=True)]
