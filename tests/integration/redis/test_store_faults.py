"""Stores on a server that is full, dies or is silent, and behind a way that cuts, delays and changes what passes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.faultproxy import FaultProxy
from support.kv.redis_objects import BLOCK_BYTES, keys, num_clients, objects, read, whole
from support.kv.redis_server import RedisServer, running_redis
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.store import RedisStore

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


def test_full_server_is_not_sent_everything_it_will_refuse(store_at: Callable[..., RedisStore]) -> None:
    with running_redis(maxmemory="3mb", maxmemory_policy="noeviction") as server:
        store_at(server).put(keys(400), objects(400))
        num_sets = int(server.run("INFO", "commandstats")["cmdstat_set"]["calls"])
        rejected = int(server.run("INFO", "commandstats")["cmdstat_set"].get("rejected_calls", 0))
        assert num_sets + rejected < 100


def test_evicting_server_keeps_what_comes_last(store_at: Callable[..., RedisStore]) -> None:
    with running_redis(maxmemory="4mb", maxmemory_policy="allkeys-lfu") as server:
        store, todo = store_at(server), objects(80)
        assert store.put(keys(80), todo) == 80
        found = read(store, 80)
        there = [number for number in range(80) if found[number] is not None]
        assert 0 < len(there) < 80
        assert all(found[number] == whole(todo[number]) for number in there)


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


def test_server_killed_in_the_middle_of_a_value_is_unreachable(store_at: Callable[..., RedisStore]) -> None:
    large = 16_000_000  # two are more than the kernel's buffers hold between the server and the proxy
    with running_redis() as server, FaultProxy(server.port) as proxy:
        store = store_at(proxy)
        store.put(keys(2), objects(2, large))
        proxy.to_client.set(stall_at=1000)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read, store, 2, large)
            assert proxy.to_client.happened.wait(60)
            server.signal(signal.SIGKILL)
            proxy.set_passing()
            with pytest.raises(TransferError) as caught:
                reading.result(60)
        assert caught.value.cause == TransferCause.UNREACHABLE


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


def test_silent_server_is_given_up_in_time(proxy: FaultProxy, store_at: Callable[..., RedisStore]) -> None:
    store = store_at(proxy, io_timeout_s=0.1)
    store.put(keys(1), objects(1))
    proxy.to_client.set(stall_at=BLOCK_BYTES // 2)
    with pytest.raises(TransferError) as caught:
        read(store, 1)
    assert caught.value.cause == TransferCause.DEADLINE


def test_slow_server_gives_the_right_bytes(proxy: FaultProxy, store_at: Callable[..., RedisStore]) -> None:
    store, todo = store_at(proxy), objects(4)
    proxy.to_server.set(delay_s=0.01)
    proxy.to_client.set(bytes_per_s=4e6, delay_s=0.01)
    assert store.put(keys(4), todo) == 4
    assert read(store, 4) == [whole(pieces) for pieces in todo]


def test_flipped_bit_reaches_the_caller_as_it_is(proxy: FaultProxy, store_at: Callable[..., RedisStore]) -> None:
    """The caller has the checksum; a store moves bytes."""
    store, todo = store_at(proxy), objects(1)
    store.put(keys(1), todo)
    proxy.to_client.set(flip_at=5000)
    (found,) = read(store, 1)
    assert found is not None
    assert sum(a != b for a, b in zip(found, whole(todo[0]), strict=True)) == 1


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
