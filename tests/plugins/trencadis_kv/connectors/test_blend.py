"""The connector as engines use it: the suites, with requests that ask for blending, and the demo model."""

from __future__ import annotations

import attrs
import pytest

from support.kv.blend_pairs import Always
from support.kv.fake_blender import NEARLY_ALL, BlendingCache
from trencadis import LLM, SamplingParams
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.blend.connector import make_blend
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_suite import twice
from trencadis_testing.workloads import arrivals, wrong_texts


class TestWhereNothingBlends(KVConnectorConformance):
    """Every look-up is a miss."""

    has_threads = True
    loads_again = False

    def make(self):
        def make(noun, name):
            parts = {"eviction": Lru, "kv_policy": Always}
            return parts[noun]() if noun in parts else ComponentContext(clock=self.clock, seed=0).make(noun, name)

        context = ComponentContext(clock=self.clock, seed=0, make=make)
        return make_blend(BlendConfig(min_chunk_tokens=8, chunk_tokens=16, min_found_ratio=0.1), context)


class TestBlend(TestWhereNothingBlends):
    """Every request asks, with all tokens computed anew, and the fake notices any state that is not the sequence's own."""

    def make(self):
        pair = super().make()
        lookup = pair.scheduler.lookup

        def asks(request, **given):
            return lookup(attrs.evolve(request, transfer_params={"blend": True, "blend_ratio": NEARLY_ALL}), **given)

        pair.scheduler.lookup = asks
        return ConnectorPair(scheduler=pair.scheduler, worker=pair.worker)

    def lose(self, pair):
        memory = pair.worker._shared.make_store()._memory
        memory.delete(list(memory._objects))

    def kv_cache(self, arrays):
        return BlendingCache(arrays, block_size=self.block_size)

    def test_prompt_that_comes_back_is_blended(self):
        """The suite's own test of that name may see misses; this one may not."""
        todo = twice(arrivals(1, num_requests=8))
        served = self._serve(todo, prefix_caching=False)
        assert sum(end.num_approximate_tokens for end in served.ends.values()) > 0
        assert wrong_texts(served, todo) == []


def documents() -> list[str]:
    return [
        "The tiles of the bench in the park are broken, and every one of them was laid by hand on a summer day. " * 3,
        "A market hall of iron stands behind the church; on Sundays its gates are closed and nobody sells fish. " * 3,
        "Who climbs the hill before the sun is up will see the sea, the harbour, and the cranes that never rest. " * 3,
    ]


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "demo",
        engine={"warmup": False},
        kv_policy={"name": "always"},
        kv_connector={"name": "blend", "blend": {"chunk_tokens": 64, "min_chunk_tokens": 32}},
    ) as one:
        yield one


PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_demo_model_gives_the_same_tokens_when_everything_is_computed_anew(llm):
    one, two, three = documents()
    exact = llm.generate([three + one + two + "And then"], PARAMS)[0]
    prompt = two + three + one + "And then"
    expected = llm.generate([prompt], PARAMS, cache_salts="apart")[0]
    asked = {"blend": True, "blend_ratio": NEARLY_ALL}
    # What was computed is kept behind the request's back: it may take a request or two until it is there.
    later = (llm.generate([prompt], PARAMS, transfer_params=asked)[0] for _ in range(20))
    blended = next(answer for answer in later if answer.num_approximate_tokens)
    assert exact.num_approximate_tokens == expected.num_approximate_tokens == 0
    assert blended.outputs[0].token_ids == expected.outputs[0].token_ids
    assert blended.num_approximate_tokens > 64


def test_demo_models_blended_kv_is_not_found_by_exact_requests(llm):
    one, two, three = documents()
    llm.generate([three + one + two + "So"], PARAMS)
    prompt = one + three + two + "So"
    asked = {"blend": True, "blend_ratio": 0.1}
    later = (llm.generate([prompt], PARAMS, transfer_params=asked)[0] for _ in range(20))
    blended = next(answer for answer in later if answer.num_approximate_tokens)
    exact = llm.generate([prompt], PARAMS)[0]
    apart = llm.generate([prompt], PARAMS, cache_salts="apart too")[0]
    assert exact.num_cached_tokens < blended.num_cached_tokens
    assert exact.num_approximate_tokens == 0
    assert exact.outputs[0].token_ids == apart.outputs[0].token_ids
