from __future__ import annotations

import threading

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, EvictionPolicy
from trencadis_kv.connectors.host_offload.host_memory import HostMemory, HostStore
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_plugins.eviction.lfu import Lfu
from trencadis_plugins.eviction.lru import Lru

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)
POLICIES = {c.name: c for c in trencadis_eviction_policies()}


def memory_of(capacity_bytes=30, eviction=None):
    return HostMemory(capacity_bytes, eviction=eviction or Lru(), clock=SimulatedClock())


def store_of(**options):
    return HostStore(memory_of(**options))


def put(store, **objects):
    return store.put(list(objects), [[memoryview(data[:1]), memoryview(data[1:])] for data in objects.values()])


def get(store, *keys, size=10):
    targets = [bytearray(size) for _ in keys]
    sizes = store.get(list(keys), [memoryview(target) for target in targets])
    return [bytes(target[:n]) if n >= 0 else None for target, n in zip(targets, sizes, strict=True)]


def test_objects_come_back_as_they_were_put():
    store = store_of()
    assert put(store, a=b"apple", b=b"bee") == 2
    assert get(store, "b", "x", "a", "b") == [b"bee", None, b"apple", b"bee"]


def test_connections_share_the_memory():
    memory = memory_of()
    put(HostStore(memory), a=b"apple")
    assert get(HostStore(memory), "a") == [b"apple"]


def test_only_a_leading_run_is_contained():
    store = store_of()
    put(store, a=b"1", b=b"2", d=b"4")
    assert store.contains(["a", "b", "c", "d"]) == 2
    assert store.contains([]) == 0


def test_object_that_is_longer_than_its_target_counts_as_not_there():
    store = store_of()
    put(store, a=b"0123456789ab")
    assert get(store, "a", size=11) == [None]


def test_newer_object_takes_the_place_of_the_older():
    memory = memory_of()
    store = HostStore(memory)
    put(store, a=b"apple")
    put(store, a=b"ant")
    assert get(store, "a") == [b"ant"]
    assert (len(memory), memory.num_bytes) == (1, 3)


def test_deleted_object_is_gone_and_its_room_free():
    memory = memory_of()
    store = HostStore(memory)
    put(store, a=b"apple")
    store.delete(["a", "never there"])
    assert get(store, "a") == [None]
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_full_memory_evicts_what_was_used_longest_ago():
    store = store_of(capacity_bytes=3)
    put(store, a=b"1", b=b"2", c=b"3")
    get(store, "a")
    put(store, d=b"4")
    assert get(store, "a", "b", "c", "d") == [b"1", None, b"3", b"4"]


def test_tail_of_a_chain_goes_before_its_head():
    store = store_of(capacity_bytes=3)
    put(store, a=b"1", b=b"2", c=b"3")
    get(store, "a", "b", "c")
    put(store, d=b"4")
    assert store.contains(["a", "b", "c"]) == 2


def test_large_object_takes_the_place_of_several():
    memory = memory_of(capacity_bytes=10)
    store = HostStore(memory)
    put(store, a=b"123", b=b"123", c=b"123")
    assert put(store, d=b"1234567") == 1
    assert store.contains(["c", "d"]) == 2
    assert memory.num_bytes == 10


def test_object_larger_than_the_memory_is_not_kept():
    store = store_of(capacity_bytes=4)
    assert put(store, a=b"12345", b=b"1234") == 1
    assert get(store, "a", "b") == [None, b"1234"]


def test_policy_that_counts_uses_keeps_what_is_used_often():
    store = store_of(capacity_bytes=2, eviction=Lfu())
    put(store, hot=b"1")
    for _ in range(3):
        get(store, "hot")
    for name in "abc":
        put(store, **{name: b"2"})
    assert get(store, "hot", "a", "b", "c") == [b"1", None, None, b"2"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_eviction_policy_keeps_the_memory_full_and_no_fuller(name):
    policy = POLICIES[name].factory(POLICIES[name].config(), CONTEXT)
    memory = memory_of(capacity_bytes=50, eviction=policy)
    store = HostStore(memory)
    for i in range(300):
        key = str(i * 7919 % 40)
        if get(store, key) == [None]:
            assert put(store, **{key: b"x" * (1 + i % 5)}) == 1
        if i % 11 == 0:
            store.delete([key])
        assert memory.num_bytes <= 50
        kept = [str(n) for n in range(40) if store.contains([str(n)])]
        assert len(kept) == len(memory)
    assert memory.num_bytes > 40


def test_policy_that_names_no_candidate_is_named():
    class Liar(EvictionPolicy):
        def on_free(self, blocks, *, depths, now_s): ...

        def on_hit(self, blocks, *, now_s): ...

        def victims(self, num_blocks):
            return [99]

        def forget(self, blocks): ...

    store = store_of(capacity_bytes=1, eviction=Liar())
    put(store, a=b"1")
    with pytest.raises(ContractError, match="Liar names block 99"):
        put(store, b=b"2")


def test_threads_never_see_half_an_object():
    memory = memory_of(capacity_bytes=400)
    start, wrong = threading.Barrier(4, timeout=10.0), []

    def work(number):
        store = HostStore(memory)
        start.wait()
        for i in range(300):
            key = str(i % 8)
            put(store, **{key: bytes([65 + number]) * 100})
            (found,) = get(store, key, size=100)
            if found is not None and (len(found) != 100 or len(set(found)) != 1):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.num_bytes == 400


def test_interrupting_and_closing_lose_nothing_that_another_store_uses():
    memory = memory_of()
    store, other = HostStore(memory), HostStore(memory)
    put(store, a=b"1")
    store.interrupt()
    store.close()
    store.close()
    assert get(other, "a") == [b"1"]


def test_objects_are_given_up_with_the_last_store():
    memory = memory_of()
    first, second = HostStore(memory), HostStore(memory)
    put(first, a=b"apple", b=b"bee")
    first.close()
    first.close()
    assert get(second, "a") == [b"apple"]
    second.close()
    assert (len(memory), memory.num_bytes) == (0, 0)
    again = HostStore(memory)
    assert get(again, "a", "b") == [None, None]
    assert put(again, c=b"x" * 30) == 1
    assert put(again, a=b"apple") == 1, "the eviction policy knows of nothing but c"
    assert get(again, "a", "c", size=30) == [b"apple", None]
