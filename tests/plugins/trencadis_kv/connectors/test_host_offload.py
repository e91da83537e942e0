"""Host memory as a connector: the suites, its own eviction, and the demo model."""

from __future__ import annotations

import threading

import pytest

from trencadis import LLM, SamplingParams
from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, EvictionPolicy
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.host_offload.host_memory import HostMemory, HostStore
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.connector_harness import hashes_of
from trencadis_testing.kv_connector import KVConnectorConformance


def context(clock, eviction=Lru):
    def make(noun, name):
        if (noun, name) == ("eviction", "lru"):
            return eviction()
        return ComponentContext(clock=clock, seed=0).make(noun, name)

    return ComponentContext(clock=clock, seed=0, make=make)


class Suite(KVConnectorConformance):
    has_threads = True
    capacity_bytes = 1 << 20

    layerwise_saves = False

    def make(self):
        config = HostOffloadConfig(capacity_bytes=self.capacity_bytes, layerwise_saves=self.layerwise_saves)
        return make_host_offload(config, context(self.clock))


class TestHostOffload(Suite):
    def test_closed_connector_holds_no_block(self, monkeypatch):
        """Whoever keeps it, as a closed engine does."""
        memories = []
        take = HostMemory.opened
        monkeypatch.setattr(HostMemory, "opened", lambda memory: memories.append(memory) or take(memory))
        harness = self.harness()
        harness.save([1, 2, 3], hashes_of(range(3)))
        self.rest(harness.pair)
        assert memories[0].num_bytes > 0
        harness.pair.scheduler.close()
        harness.pair.worker.close()
        assert memories[0].num_bytes == 0
        assert harness.pair.worker._staging._memory.nbytes == 0


class TestHostOffloadThatSavesByLayer(Suite):
    layerwise_saves = True


class TestHostOffloadThatEvicts(Suite):
    """Room for eight blocks of the suite's cache."""

    capacity_bytes = 8 * (128 + 96)
    loads_again = False


PROMPT = "The tiles of the bench in the park are broken, and every one of them was laid by hand. " * 4


def test_demo_model_goes_on_from_what_host_memory_has():
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(
        "demo", engine={"warmup": False}, cache={"prefix_caching": False}, kv_connector={"name": "host_offload"}
    ) as llm:
        computed = llm.generate([PROMPT], params)[0]
        # What was computed is saved behind the request's back: it may take a request or two until it is there.
        later = (llm.generate([PROMPT], params)[0] for _ in range(20))
        loaded = next(answer for answer in later if answer.num_cached_tokens)
    assert loaded.outputs[0].token_ids == computed.outputs[0].token_ids
    assert computed.num_cached_tokens == 0
    assert loaded.num_cached_tokens > 64


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


def test_only_a_leading_run_is_contained():
    store = store_of()
    put(store, a=b"1", b=b"2", d=b"4")
    assert store.contains(["a", "b", "c", "d"]) == 2
    assert store.contains([]) == 0


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


def test_object_larger_than_the_memory_is_not_kept():
    store = store_of(capacity_bytes=4)
    assert put(store, a=b"12345", b=b"1234") == 1
    assert get(store, "a", "b") == [None, b"1234"]


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
