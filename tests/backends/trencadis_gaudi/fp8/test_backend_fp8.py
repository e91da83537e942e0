"""The backend and whole engines in fp8, on a model whose choice of tokens is clear."""

from __future__ import annotations

import pytest
import torch

from support.backends import fp8_scene, gaudi_engines, tiny_models
from support.backends.gaudi_ranks import drive, generate, load_gaudi
from trencadis.errors import ModelLoadError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Phase, Request, SamplingParams
from trencadis_gaudi import flat_cache
from trencadis_gaudi.runner import GaudiRunner
from trencadis_testing.driver import Work

PLAN = AllocationPlan(num_blocks=24, block_size=16, num_rows=2, max_model_len=96, max_num_batched_tokens=64)
BUCKETS = (Bucket(1, 32, 0), Bucket(1, 32, 4), Bucket(2, 1, 8, Phase.DECODE))
MODES = ["lazy", "compile", "eager"]
CACHE = {"kv_cache_dtype": "fp8"}
DYNAMIC = {"fp8": "dynamic"}


@pytest.fixture(scope="module")
def clear_path(tmp_path_factory):
    return fp8_scene.save_clear_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """Options for static scales of that model, those of the KV cache too."""
    tokens = torch.tensor([tiny_models.prompt(60)])
    path = tmp_path_factory.mktemp("measured") / "measure"
    fp8_scene.measure(fp8_scene.clear_model(), tokens, path, caches=True)
    return {"fp8": "static", "fp8_measurements": str(path), **CACHE}


def run(backend, num_tokens=4):
    """Warm up, freeze, and generate after a prompt in two chunks; returns the tokens."""
    backend.allocate(PLAN)
    backend.warm_up(BUCKETS)
    driver = drive(backend, PLAN, BUCKETS, tiny_models.prompt(50))
    driver.step([Work(0, num_tokens=30)])
    return generate(driver, num_tokens)


@pytest.fixture(scope="module")
def expected(clear_path):
    return tiny_models.greedy_reference(clear_path, tiny_models.prompt(50), 4)


@pytest.mark.representatives(1, ci=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_tokens_are_those_of_the_model_itself_and_nothing_is_compiled_late(clear_path, static, expected, mode, kind):
    """As many graphs as without fp8: no scale is part of one. Every operation has a kernel."""
    graphs = []
    for options in ({}, static if kind == "static" else {**DYNAMIC, **CACHE}):
        torch._dynamo.reset()
        backend = load_gaudi(clear_path, None, mode=mode, emulated_frozen=mode != "eager", **options)
        assert run(backend) == expected
        emulated = backend.habana.emulated
        assert not emulated.fallbacks
        assert backend.habana.dynamo.num_graph_breaks == backend.habana.dynamo.num_limit_hits == 0
        graphs.append(emulated.num_compilations)
        backend.close()
    assert mode == "eager" or graphs[0] == graphs[1]


def test_planted_fault_of_the_cache_is_noticed_in_the_tokens(clear_path, static, expected, monkeypatch):
    """A scale that is applied twice, of 8 here."""
    read = flat_cache.from_fp8
    monkeypatch.setattr(flat_cache, "from_fp8", lambda stored, scale, dtype: read(stored, scale * 8, dtype) * 8)
    assert run(load_gaudi(clear_path, None, mode="eager", **static)) != expected


def test_memory_pays_for_twice_the_blocks_of_bfloat16(clear_path):
    blocks = []
    for options in ({}, CACHE, {**DYNAMIC, **CACHE}):
        backend = load_gaudi(clear_path, None, dtype="bfloat16", emulated_memory_bytes=16 * 2**20, **options)
        backend.memory(max_num_batched_tokens=64, max_num_seqs=4)
        blocks.append(backend._shares.num_blocks(backend._block_bytes(128)))
        backend.allocate(PLAN)
        assert backend.habana.emulated.booked("KV cache") == 25 * backend._block_bytes(16)
    assert 2 * blocks[0] <= blocks[1] <= 2 * blocks[0] + 4
    assert blocks[2] > blocks[1]  # smaller weights leave more for the cache


def test_tokens_in_bfloat16_are_the_same(clear_path, static, expected):
    backend = load_gaudi(clear_path, None, dtype="bfloat16", mode="eager", **static)
    assert backend._model().dtype is torch.bfloat16
    assert run(backend) == expected


def test_logits_with_the_cache_alone_in_fp8_are_near_those_without(clear_path, static, monkeypatch):
    """Over their spread, in the root mean square; measured 0.002."""
    seen, logits = [], GaudiRunner._logits

    def note(self, *args, **options):
        seen.append(logits(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(GaudiRunner, "_logits", note)
    found = []
    for options in ({}, {**static, "fp8": "off"}):
        run(load_gaudi(clear_path, None, mode="eager", **options))
        found.append(seen[-1].cpu()[0])
    assert 1e-4 < float((found[1] - found[0]).square().mean().sqrt() / found[0].std()) < 0.01


def test_measurement_of_another_model_is_refused_with_file_and_layer(clear_path, tmp_path):
    other = tiny_models.make_model("gpt_neox")
    path = fp8_scene.measure(other, torch.tensor([tiny_models.prompt(9)]), tmp_path / "other")
    with pytest.raises(
        ModelLoadError, match=r"other_hooks_maxabs_0_1\.json: layer model\.layers\.0\.self_attn\.q_proj"
    ):
        load_gaudi(clear_path, None, fp8="static", fp8_measurements=str(path))


ENGINES = {
    "swapped": {"preemption": "swap", "num_blocks": 9, "contiguous": True, "defragmenter": {"threshold": 0}},
    "merged": {"merged_prefill": True, "max_prefill_batch_size": 3},
    "unified": {"layout": "unified", "strategy": "unified"},
    "compiled": {
        "mode": "compile",
        "strategy_options": {"limit": 1},
        "contiguous": True,
        "defragmenter": {"threshold": 0},
    },
}


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", ENGINES)
def test_engines_tokens_are_those_of_the_torch_backend(clear_path, static, way):
    """Blocks are moved, swapped and shared in fp8; nothing is compiled after the warm-up."""
    served = []
    for backend, options in (("torch", {"device": "cpu", "strategy": "exact"}), ("gaudi", {**static, **ENGINES[way]})):
        frozen = {"emulated_frozen": True} if backend == "gaudi" else {}
        engine = gaudi_engines.open_engine(clear_path, backend=backend, **options, **frozen)
        served.append(gaudi_engines.serve(engine, 1, greedy=True))
        totals = engine.totals
        assert backend == "torch" or totals.num_compilations == totals.num_failed_steps == 0
        assert way != "swapped" or backend == "torch" or totals.num_blocks_swapped_in > 0
        engine.close()
    for name, one in served[1].items():
        tokens = one.token_ids.tolist()
        assert tokens == served[0][name].token_ids.tolist()[: len(tokens)]
        assert len(tokens) == len(served[0][name].token_ids) or one.finish_reason.value == "abort"


@pytest.mark.slow
def test_blocks_of_a_store_are_loaded_in_the_same_format_only(clear_path, static, tmp_path):
    tables = {
        "kv_connector": {"name": "filesystem", "filesystem": {"path": str(tmp_path / "blocks")}},
        "kv_policy": {"name": "always"},
    }
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    cached, tokens = [], []
    for options in (static, static, {}, {**DYNAMIC, **CACHE}):
        engine = gaudi_engines.open_engine(clear_path, warmup=False, prefix_caching=False, tables=tables, **options)
        finished = []
        for seed in range(3):  # which have no block in common
            engine.add(
                Request(request_id=str(seed), prompt_token_ids=tuple(tiny_models.prompt(50, seed=seed)), params=params)
            )
            while engine.has_work:
                finished += engine.step().finished
        engine.close()  # which writes what is not written yet
        cached.append(sum(one.num_cached_tokens for one in finished))
        tokens.append([one.token_ids.tolist() for one in finished])
    assert cached == [0, 3 * 48, 0, 0]
    assert tokens[0] == tokens[1]
