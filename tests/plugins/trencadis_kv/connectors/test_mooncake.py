"""KV blocks through a Mooncake store: error codes, staging memory, the store, and the connector over it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, TransferError
from trencadis.interfaces import ComponentContext
from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.client import MooncakeClient, check_package
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.mooncake.connector import (
    BadKeys,
    IOWorker,
    MooncakeStore,
    make_mooncake,
    transfer_error,
)
from trencadis_kv.connectors.native_calls import AbandonedCalls
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.fake_pool import FakeKVCache


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-900, TransferCause.UNREACHABLE),
        (-901, TransferCause.UNREACHABLE),
        (-1010, TransferCause.UNREACHABLE),
        (-1, TransferCause.RAISED),
        (-400, TransferCause.RAISED),
        (-1100, TransferCause.RAISED),
    ],
)
def test_code_has_a_cause(code, cause):
    error = transfer_error(code, "h:1")
    assert error.cause == cause
    assert str(code) in str(error)


def test_master_that_does_not_answer_is_named_with_what_to_do():
    error = transfer_error(-900, "10.0.0.7:50051")
    assert "10.0.0.7:50051" in str(error)
    assert "kv_connector.mooncake.master" in error.hint


class Library:
    """Counts what is registered; stands in for the package's client."""

    def __init__(self, code=0):
        self.code = code
        self.registered = []
        self.changed = threading.Event()

    def register_buffer(self, address, num_bytes):
        self.registered.append((address, num_bytes))
        return self.code

    def unregister_buffer(self, address):
        self.registered = [one for one in self.registered if one[0] != address]
        self.changed.set()
        return 0


def test_buffer_is_registered_for_the_first_call_and_until_the_end():
    library = Library()
    io_worker = IOWorker(library, 4096, left=AbandonedCalls(1))
    assert library.registered == []
    assert io_worker.run(lambda one: len(one.registered), timeout_s=5.0) == 1
    assert io_worker.run(lambda one: one.registered[:], timeout_s=5.0) == [(io_worker.address, 4096)]
    io_worker.close()
    assert library.changed.wait(60.0)
    assert library.registered == []


def test_memory_that_cannot_be_registered_is_an_error():
    io_worker = IOWorker(Library(code=-1), 4096, left=AbandonedCalls(1))
    with pytest.raises(TransferError, match="registers no memory: code -1") as caught:
        io_worker.run(lambda _: 1, timeout_s=5.0)
    assert caught.value.cause == TransferCause.RAISED
    io_worker.close()


def test_buffer_of_a_call_that_was_left_behind_stays_registered_until_it_returns():
    library, go_on = Library(), threading.Event()
    io_worker = IOWorker(library, 4096, left=AbandonedCalls(1))
    with pytest.raises(TransferError):
        io_worker.run(lambda _: go_on.wait(), timeout_s=0.05)
    assert io_worker.is_left
    io_worker.close()
    assert library.registered
    go_on.set()
    assert library.changed.wait(60.0)
    assert library.registered == []


class Pool:
    """A client, and stores of it; keys of its own."""

    def __init__(self, address, **changes):
        given = {"pool_bytes": 64 << 20, "start_timeout_s": 30.0, "buffer_bytes": 1 << 16, **changes}
        self.config = MooncakeConfig(master=address, **given)
        self.client, self.bad = MooncakeClient(self.config), BadKeys()
        self.name = uuid.uuid4().hex
        self.stores = []

    def store(self):
        self.stores.append(MooncakeStore(self.client, self.bad, self.config))
        return self.stores[-1]

    def keys(self, number):
        return [f"kv1/{self.name}/{i}" for i in range(number)]


@pytest.fixture
def pool(shared_master):
    one = Pool(shared_master.address)
    yield one
    for store in one.stores:
        store.close()


def objects(number, size=1000):
    rng = np.random.default_rng(number)
    return [[memoryview(rng.bytes(128)), memoryview(rng.bytes(size))] for _ in range(number)]


def whole(pieces):
    return b"".join(pieces)


def test_what_was_put_is_there_and_comes_back_from_another_thread_s_store(pool):
    keys, put = pool.keys(200), objects(200)
    assert pool.store().put(keys, put) == 200
    other = pool.store()
    assert other.contains([*keys, "kv1/nobody"]) == 200
    assert other.contains(["kv1/nobody", *keys]) == 0
    assert other.contains([]) == 0
    targets = [memoryview(bytearray(2000)) for _ in keys]
    assert list(other.get(keys, targets)) == [1128] * 200
    assert [bytes(target[:1128]) for target in targets] == [whole(one) for one in put]


def test_object_larger_than_the_buffer_passes(pool):
    (key,), (put,) = pool.keys(1), objects(1, size=300_000)
    store, target = pool.store(), memoryview(bytearray(300_128))
    assert store.put([key], [put]) == 1
    assert list(store.get([key], [target])) == [300_128]
    assert bytes(target) == whole(put)


def test_what_is_not_there_or_too_long_is_minus_one(pool):
    keys, put = pool.keys(3), objects(2)
    store = pool.store()
    store.put(keys[:2], put)
    targets = [memoryview(bytearray(size)) for size in (2000, 500, 2000)]
    assert list(store.get(keys, targets)) == [1128, -1, -1]
    assert store.contains(keys) == 1, "an object that cannot be read counts as there"


def test_deleted_object_can_be_put_anew_although_somebody_has_just_read_it(pool):
    (key,), (old, new) = pool.keys(1), objects(2)
    store, target = pool.store(), memoryview(bytearray(1128))
    store.put([key], [old])
    store.get([key], [target])  # takes a lease
    store.delete([key, "kv1/nobody"])
    assert store.contains([key]) == 0
    assert store.put([key], [new]) == 1
    store.get([key], [target])
    assert bytes(target) == whole(new)


def test_object_that_cannot_be_deleted_is_absent_until_it_is_overwritten(pool):
    (key,), (old, new) = pool.keys(1), objects(2)
    store, target = pool.store(), memoryview(bytearray(1128))
    store.put([key], [old])
    pool.bad.add(key)
    assert pool.store().contains([key]) == 0
    assert store.put([key], [new]) == 1
    assert store.contains([key]) == 1
    store.get([key], [target])
    assert bytes(target) == whole(new), "a put kept the old value"


def test_full_pool_keeps_no_more_and_raises_nothing(shared_master):
    one = Pool(shared_master.address, pool_bytes=16 << 20, buffer_bytes=4 << 20)
    store = one.store()
    try:
        sizes = [3 << 20] * 24
        put = [[memoryview(bytes(size))] for size in sizes]
        num_kept = store.put(one.keys(24), put)
        assert 0 < num_kept < 24
    finally:
        store.close()


def test_master_that_stands_still_costs_the_time_out_and_a_late_answer_is_not_believed(shared_master):
    one = Pool(shared_master.address, io_timeout_s=0.3)
    keys, put = one.keys(2), objects(2)
    store = one.store()
    store.put(keys, put)
    with shared_master.stopped():
        start_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            store.contains(keys)
        assert time.monotonic() - start_s < 5.0
        assert caught.value.cause == TransferCause.DEADLINE
        assert one.client.left.number == 1
    targets = [memoryview(bytearray(1128)) for _ in keys]
    assert list(store.get(keys, targets)) == [1128, 1128]
    assert [bytes(target) for target in targets] == [whole(one) for one in put]
    store.close()


def test_interrupt_ends_a_call_that_waits(shared_master):
    one = Pool(shared_master.address, io_timeout_s=60.0)
    store, caught = one.store(), []
    store.contains(one.keys(1))

    def ask():
        try:
            store.contains(one.keys(1))
        except TransferError as error:
            caught.append(error.cause)

    with shared_master.stopped():
        thread = threading.Thread(target=ask)
        thread.start()
        until_s = time.monotonic() + 60.0
        while thread.is_alive() and time.monotonic() < until_s:
            store.interrupt()
            thread.join(0.01)
    assert caught == [TransferCause.CANCELLED]
    store.close()


def test_master_that_was_killed_is_unreachable_and_one_that_is_back_is_used():
    from support.kv.mooncake_master import running_master

    with running_master() as master:
        one = Pool(master.address, io_timeout_s=10.0)
        keys, put = one.keys(2), objects(2)
        store = one.store()
        assert store.put(keys, put) == 2
        master.kill()
        with pytest.raises(TransferError) as caught:
            store.contains(keys)
        assert caught.value.cause == TransferCause.UNREACHABLE
        master.start()
        until_s, num_kept = time.monotonic() + 20.0, 0
        while num_kept < 2 and time.monotonic() < until_s:
            try:
                num_kept = store.put(keys, put)
            except TransferError:
                continue
        assert num_kept == 2, "a master that is back is never used again"
        store.close()


def test_closed_store_raises(pool):
    store = pool.store()
    store.close()
    store.close()
    with pytest.raises(TransferError, match="closed"):
        store.contains(pool.keys(1))


class Scripted:
    """Stands in for the package's client, where a pool of one machine does not behave so on demand."""

    def __init__(self, **answers):
        self.answers = answers

    def register_buffer(self, *_):
        return 0

    def unregister_buffer(self, *_):
        return 0

    def __getattr__(self, name):
        return lambda keys, *_: [self.answers[name]] * len(keys)


def scripted(monkeypatch, **answers):
    one = Pool("127.0.0.1:1")
    monkeypatch.setattr(one.client, "library", lambda: Scripted(**answers))
    monkeypatch.setattr("trencadis_kv.connectors.mooncake.connector.replication", lambda _: None)
    return one


def test_object_under_a_lease_counts_as_absent_once_it_was_to_be_deleted(monkeypatch):
    one = scripted(monkeypatch, batch_remove=-706, batch_is_exist=1)
    store = one.store()
    assert store.contains(one.keys(2)) == 2
    store.delete(one.keys(1))
    assert store.contains(one.keys(2)) == 0


@pytest.mark.parametrize("code", [-707, -800])
def test_object_whose_holder_is_gone_counts_as_absent(monkeypatch, code):
    one = scripted(monkeypatch, batch_get_into=code, batch_is_exist=1)
    store = one.store()
    assert list(store.get(one.keys(1), [memoryview(bytearray(8))])) == [-1]
    assert store.contains(one.keys(1)) == 0, "every request would try to load it"


def test_master_that_is_gone_is_an_error_and_not_a_miss(monkeypatch):
    one = scripted(monkeypatch, batch_get_into=-900, batch_is_exist=-900, batch_put_from=-900)
    store = one.store()
    for call in (
        lambda: store.contains(one.keys(1)),
        lambda: store.get(one.keys(1), [memoryview(bytearray(8))]),
        lambda: store.put(one.keys(1), objects(1)),
    ):
        with pytest.raises(TransferError) as caught:
            call()
        assert caught.value.cause == TransferCause.UNREACHABLE


def harness(config):
    pair = make_mooncake(config, ComponentContext(clock=SimulatedClock(), seed=0))
    return ConnectorHarness(
        pair,
        block_size=4,
        cache=lambda arrays: FakeKVCache(arrays, block_size=4),
        settle=lambda: pair.worker.wait_idle(0.05),
        patience_s=20.0,
    )


def test_blocks_of_one_engine_are_loaded_by_another(shared_master):
    config = MooncakeConfig(
        master=shared_master.address,
        namespace=uuid.uuid4().hex,
        pool_bytes=64 << 20,
        start_timeout_s=30.0,
        lookup_timeout_s=10.0,
    )
    writer, reader, hashes = harness(config), harness(config), hashes_of(range(5))
    try:
        saved = writer.save([9, 2, 7, 4, 11], hashes)
        found = reader.lookup(hashes, num_blocks=5)
        assert found.num_tokens == 20
        assert reader.load(found.transfer_id, [3, 14, 0, 8, 6], hashes) == ""
        assert reader.contents([3, 14, 0, 8, 6]) == saved
    finally:
        for one in (reader, writer):
            one.pair.scheduler.close()
            one.pair.worker.close()


def test_making_a_connector_connects_nothing():
    code = (
        "import sys; from trencadis_kv.connectors.mooncake.config import MooncakeConfig;"
        "import trencadis_kv.connectors.mooncake.connector; print('mooncake.store' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("master", ["localhost:1", "10.0.0.7:65535", "[::1]:50051", "cache-1.internal:50051"])
def test_address_is_taken(master):
    assert MooncakeConfig(master=master).master == master


@pytest.mark.parametrize("master", ["", "localhost", "localhost:", ":50051", "h:0", "h:65536", "h:1:2", "a b:1"])
def test_what_is_no_address_is_refused(master):
    with pytest.raises(ValueError, match="master must be host:port"):
        MooncakeConfig(master=master)


def test_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="needs the package mooncake") as caught:
        check_package()
    assert "trencadis[mooncake]" in caught.value.hint


def test_missing_system_library_is_named_with_how_to_get_it(monkeypatch):
    def fail(_):
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1") as caught:
        check_package()
    assert "apt-get install libibverbs1 librdmacm1" in caught.value.hint


def test_master_that_is_not_there_is_found_out_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = MooncakeClient(MooncakeConfig(master=f"127.0.0.1:{port}"))
    start_s = time.monotonic()
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}.*refused") as caught:
        client.library()
    assert caught.value.cause == TransferCause.UNREACHABLE
    assert "mooncake_master" in caught.value.hint
    assert time.monotonic() - start_s < 60.0


def test_something_that_listens_and_never_answers_costs_the_start_time_only():
    pytest.importorskip("mooncake.store", reason="mooncake is not installed", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = MooncakeClient(
            MooncakeConfig(master=f"127.0.0.1:{silent.getsockname()[1]}", start_timeout_s=1.0, pool_bytes=0)
        )
        start_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            client.library()
    assert caught.value.cause == TransferCause.UNREACHABLE
    assert time.monotonic() - start_s < 60.0, "set-up waits for ten minutes, with Python's lock"


def test_client_lives_from_the_first_store_to_the_last(shared_master):
    client = MooncakeClient(MooncakeConfig(master=shared_master.address, pool_bytes=0, start_timeout_s=30.0))
    client.open()
    client.open()
    library = client.library()
    client.close()
    assert client.library() is library
    assert library.is_exist("kv1/nobody") == 0
    client.close()
    client.open()
    assert client.library() is not library, "it was not closed"
    client.close()
