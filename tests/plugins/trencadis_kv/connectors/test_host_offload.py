"""Host memory as a connector: the suites, its own eviction, and the demo model."""

from __future__ import annotations

from trencadis import LLM, SamplingParams
from trencadis.interfaces import ComponentContext
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.host_offload.host_memory import HostMemory
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
