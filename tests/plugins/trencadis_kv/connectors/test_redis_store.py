"""Blocks in a Redis server, and its failures as transfer errors."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.kv.redis_objects import keys, num_clients, objects, read, stores, whole
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


def test_another_connection_sees_what_was_put(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    todo = objects(3)
    store_at(server).put(keys(3), todo)
    assert read(store_at(server), 3) == [whole(pieces) for pieces in todo]


def test_thousands_of_small_objects_go_through_the_windows(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    store, todo = store_at(server), objects(1500, 20)
    assert store.put(keys(1500), todo) == 1500
    assert read(store, 1500, 20) == [whole(pieces) for pieces in todo]
    assert store.contains(keys(1500)) == 1500


def test_objects_that_are_not_there_are_told_apart(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    store, todo = store_at(server), objects(5)
    store.put(keys(5), todo)
    server.run("DEL", keys(5)[2])
    assert [found is None for found in read(store, 5)] == [False, False, True, False, False]


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


def test_stores_of_several_threads_do_not_meet(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    todo, start = objects(20), threading.Barrier(4)

    def work(number: int) -> list[bytes | None]:
        store = store_at(server)
        start.wait()
        for _ in range(5):
            store.put(keys(20), todo)
            found = read(store, 20)
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[whole(pieces) for pieces in todo]] * 4


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


def test_database_that_the_server_does_not_have_is_named(
    server: RedisServer, store_at: Callable[..., RedisStore]
) -> None:
    with pytest.raises(TransferError, match="DB index is out of range"):
        store_at(server, url=f"{server.url}/99").contains(keys(1))


def test_replica_takes_nothing_and_says_so(server: RedisServer, store_at: Callable[..., RedisStore]) -> None:
    with running_redis() as replica:
        replica.run("REPLICAOF", "127.0.0.1", str(server.port))
        with pytest.raises(TransferError, match="READONLY") as caught:
            store_at(replica).put(keys(1), objects(1))
        assert caught.value.cause == TransferCause.UNREACHABLE


def test_unix_socket_that_is_not_there_is_named(store_at: Callable[..., RedisStore]) -> None:
    with pytest.raises(TransferError, match=r"unix:///nowhere/redis\.sock") as caught:
        redis_stores(RedisConfig(url="unix:///nowhere/redis.sock"))().contains(keys(1))
    assert caught.value.cause == TransferCause.UNREACHABLE
