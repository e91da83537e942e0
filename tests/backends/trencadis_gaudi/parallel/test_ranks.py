"""Ranks with an emulated device each, next to one, and next to transformers."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from support.backends import fp8_scene, gaudi_engines, gaudi_ranks, tiny_models
from support.backends.families import save_with_biases
from support.backends.gaudi_ranks import drive, generate, load_gaudi, make_gaudi
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, ModelSource, Phase
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.backend import ArgmaxSampler, BackendConformance
from trencadis_testing.driver import BackendDriver, Work

PLAN = AllocationPlan(num_blocks=30, block_size=16, num_rows=4, max_model_len=96, max_num_batched_tokens=64)
PROMPTS = {0: tiny_models.prompt(19), 1: tiny_models.prompt(5, seed=1), 3: tiny_models.prompt(33, seed=2)}
BUCKETS = (Bucket(1, 32, 0), Bucket(1, 32, 4), Bucket(2, 1, 8, Phase.DECODE), Bucket(4, 1, 30, Phase.DECODE))
NIGHTLY = pytest.mark.nightly


def loaded(ranked, path, size=2, *, sampler=None, plan=PLAN, expert=1, **options):
    backend = ranked(functools.partial(make_gaudi, **options), size, expert=expert)
    backend.load(ModelSource(path=str(path)), sampler=sampler or StandardSampler(standard_chain("vllm")))
    backend.allocate(plan)
    return backend


def devices(backend):
    return [rank.habana.emulated for rank in backend.ranks.all]


@pytest.mark.nightly
class TestTwo(BackendConformance):
    kind, size, block_size = "gemma3", 2, 16

    @pytest.fixture(autouse=True)
    def _model(self, model_path, ranked):
        self.path, self._ranked = model_path(self.kind), ranked
        self.source = ModelSource(path=str(self.path))

    def make(self):
        return self._ranked(functools.partial(make_gaudi, max_prefill_batch_size=2), self.size)

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


@pytest.mark.nightly
class TestFourWithTwoKVHeads(TestTwo):
    kind, size = "llama", 4


CASES = [
    ("llama", 2, 1, "lazy"),
    *(
        (kind, 2, 1, mode)
        for kind in ("gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_oss")
        for mode in ("lazy", "eager")
    ),
    *((kind, 2, 2, "lazy") for kind in ("mixtral", "qwen3_moe", "gpt_oss")),
    ("qwen3_moe", 4, 4, "eager"),
    *((kind, 4, 1, "lazy") for kind in ("llama", "gemma3", "phi3")),
]


@pytest.mark.parametrize(
    ("kind", "size", "expert", "mode"),
    [pytest.param(*case, marks=NIGHTLY if at else ()) for at, case in enumerate(CASES)],
)
def test_greedy_tokens_are_those_of_transformers_in_whole_prompts_and_in_chunks(
    model_path, ranked, kind, size, expert, mode
):
    """The forward of each share is checked against its own, which takes exchanges between the hosts; rows are the same everywhere."""
    path = model_path(kind)
    expected = {row: tiny_models.greedy_reference(path, tokens, 8) for row, tokens in PROMPTS.items()}
    options = {"mode": mode, "check_model": True, "max_prefill_batch_size": 2}
    backend = loaded(ranked, path, size, expert=expert, sampler=ArgmaxSampler(), **options)
    for chunk in (0, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 8, chunk=chunk) == expected
    # Padding writes to the last row, in no defined order.
    rows = [rank._rows.tokens.tolist()[:-1] for rank in backend.ranks.all]
    assert all(one == rows[0] for one in rows)


def test_an_exchange_is_one_operation_of_a_graph_and_nothing_is_compiled_after_the_warm_up(model_path, ranked):
    """Per pass: the embedding's sum and two a layer, the gather of logits, the broadcast of tokens; the same on every rank."""
    backend = loaded(ranked, model_path("llama"), emulated_frozen=True)
    backend.warm_up(BUCKETS)
    before = [device.num_compilations for device in devices(backend)]
    assert before[0] > 0
    assert [rank.habana.is_lazy for rank in backend.ranks.all] == [True, True]
    assert [len(rank._capture.graphs) for rank in backend.ranks.all] == [len(BUCKETS)] * 2
    groups = [rank._share.exchange._group for rank in backend.ranks.all]
    for group in groups:
        group.num_calls.clear()
    expected = tiny_models.greedy_reference(model_path("llama"), tiny_models.prompt(30), 5)
    assert generate(drive(backend, PLAN, BUCKETS, tiny_models.prompt(30)), 5) == expected
    assert [device.num_compilations for device in devices(backend)] == before
    assert [dict(group.num_calls) for group in groups] == [
        {"all_reduce": 5 * (1 + 2 * 3), "all_gather": 5, "broadcast": 5}
    ] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("regional", [True, False])
def test_torch_compile_sees_exchanges_as_operations(model_path, ranked, regional):
    torch._dynamo.reset()
    path = model_path("llama")
    backend = loaded(ranked, path, mode="compile", regional=regional, fullgraph=True, emulated_frozen=True)
    backend.warm_up(BUCKETS)
    expected = tiny_models.greedy_reference(path, tiny_models.prompt(30), 4)
    assert generate(drive(backend, PLAN, BUCKETS, tiny_models.prompt(30)), 4) == expected
    for rank in backend.ranks.all:
        assert rank.habana.dynamo.num_graph_breaks == rank.habana.dynamo.num_limit_hits == 0
        assert rank.watch.num_recompilations == 0


# ------------------------------------------------------------------------------------------------------- engines

DRAFTS = {
    "speculation": {"name": "ngram", "ngram": {"max_draft_tokens": 2, "min_match": 1}},
    "draft_length": {"name": "fixed"},
}
WAYS = {
    **gaudi_engines.LAYOUTS,
    "swapped": {"num_blocks": 9, "preemption": "swap"},
    "scored": {"prompt_logprobs": True},
    "drafts": {"tables": DRAFTS},
    "drafts with a rule": {"tables": {**DRAFTS, "acceptance": {"name": "token"}}},
    "budgeted": {"capture": "budgeted", "emulated_memory_bytes": 2_500_000, "graph_reserve": 0.5},
    "three layers of experts": {"kind": "qwen3_moe"},
}


def served(path, **options):
    """Return what an engine makes of a fixed trace, log-probabilities of prompts included, and its counts."""
    engine = gaudi_engines.open_engine(path, **options)
    found = gaudi_engines.serve(engine, 11, num_requests=10, scores_prompts=options.get("prompt_logprobs", False))
    totals = engine.totals
    engine.close()
    return gaudi_engines.tokens(found), totals


@pytest.mark.parametrize("way", [pytest.param(way, marks=NIGHTLY if at else ()) for at, way in enumerate(WAYS)])
def test_a_fixed_trace_of_every_kind_of_request_compiles_nothing_on_any_rank(model_path, way):
    """And brings the tokens of one rank: requests arrive, are aborted, share prefixes, lose their blocks, draw with seeds."""
    options = {"strategy_options": {"limit": 1}, "max_num_seqs": 3, **WAYS[way]}
    if options.get("strategy") == "unified":
        options.pop("strategy_options")
    path = model_path(options.pop("kind", "llama"))
    expected, _ = served(path, warmup=False, **options)
    found, totals = served(path, ranks=2, emulated_frozen=True, **options)
    backend = gaudi_ranks.MADE.pop()
    backend.ranks.close()
    assert found == expected
    assert totals.num_compilations == totals.num_unprepared == totals.num_failed_steps == 0
    assert [rank.watch.num_recompilations for rank in backend.ranks.all] == [0, 0]
    first, second = devices(backend)
    assert first.frozen
    assert second.frozen
    assert not first.fallbacks + second.fallbacks


# ------------------------------------------------------------------------------------------- fp8, plans, texts


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    """A model whose choice is clear, and options for its static scales."""
    path = fp8_scene.save_clear_model(tmp_path_factory.mktemp("models"))
    measured = tmp_path_factory.mktemp("measured") / "measure"
    fp8_scene.measure(fp8_scene.clear_model(), torch.tensor([tiny_models.prompt(60)]), measured, caches=True)
    return path, {"fp8_measurements": str(measured), "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("fp8", ["static", pytest.param("dynamic", marks=NIGHTLY)])
def test_linear_layers_and_cache_in_fp8_run_on_shares(clear, ranked, fp8):
    """Scales of weights are those of a rank's part; the output layer stays as it is on every rank."""
    path, cache = clear
    expected = tiny_models.greedy_reference(path, tiny_models.prompt(50), 4)
    backend = loaded(ranked, path, fp8=fp8, **cache)
    driver = drive(backend, PLAN, BUCKETS, tiny_models.prompt(50))
    driver.step([Work(0, num_tokens=30)])
    assert generate(driver, 4) == expected
    for rank in backend.ranks.all:
        kinds = {name: type(part).__name__ for name, part in rank._model().model.named_modules()}
        assert kinds["lm_head.local"] == "Linear"
        assert kinds["model.layers.0.self_attn.q_proj"] == f"{fp8.capitalize()}Linear"
        assert kinds["model.layers.0.self_attn.o_proj.local"] == f"{fp8.capitalize()}Linear"


def test_layers_that_fp8_leaves_out_are_named_as_in_the_whole_model(clear, ranked):
    path, _ = clear
    (rank, _) = loaded(ranked, path, fp8="dynamic", fp8_exclude=("o_proj$",)).ranks.all
    kinds = {name: type(part).__name__ for name, part in rank._model().model.named_modules()}
    assert kinds["model.layers.0.self_attn.o_proj.local"] == "Linear"
    assert kinds["model.layers.0.mlp.down_proj.local"] == "DynamicLinear"


@pytest.mark.slow
def test_a_configured_plan_divides_what_transformers_does_not(tmp_path, ranked):
    path, plan = save_with_biases("gpt2", tmp_path), tmp_path / "plan.json"
    plan.write_text(
        '{"transformer.wte": "embedding_rowwise", "transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}'
    )
    prompts = {0: tiny_models.prompt(19)}
    alone = load_gaudi(path, PLAN, sampler=ArgmaxSampler())
    expected = BackendDriver(alone, PLAN).generate(prompts, 6)
    backend = loaded(ranked, path, sampler=ArgmaxSampler(), tensor_plan=str(plan))
    assert backend.ranks.all[0]._share.divided_ratio > 0.3
    assert BackendDriver(backend, PLAN).generate(prompts, 6) == expected


def test_texts_are_embedded_by_all_ranks(model_path, ranked):
    texts = [np.array(tiny_models.prompt(length, seed=length), np.int32) for length in (3, 40, 17)]
    alone = load_gaudi(model_path("gemma3"), PLAN, sampler=ArgmaxSampler())
    found = loaded(ranked, model_path("gemma3"), sampler=ArgmaxSampler()).embed(texts)
    np.testing.assert_allclose(found, alone.embed(texts), atol=1e-5)


def test_kv_blocks_of_ranks_are_told_apart(model_path, ranked):
    layouts = [rank.kv_cache().layout for rank in loaded(ranked, model_path("llama")).ranks.all]
    assert [(one.first_head, one.last_head) for one in layouts] == [(0, 1), (1, 2)]
    assert layouts[0].sums == layouts[1].sums == "+tp2"


# ------------------------------------------------------------------------------------------- decisions of all


def test_graphs_are_those_that_fit_on_the_rank_with_the_least_memory(model_path, ranked):
    """Else one rank would replay a graph, and another capture anew."""
    backend = loaded(ranked, model_path("llama"))
    first, second = devices(backend)
    second.total_bytes = second.used_bytes + 250_000
    for rank in backend.ranks.all:
        rank._capture._margin = 0
    report = backend.warm_up(BUCKETS)
    graphs = [rank._capture.graphs for rank in backend.ranks.all]
    assert graphs[0] == graphs[1]
    assert 0 < len(graphs[0]) < len(BUCKETS)
    assert set(report.prepared) == set(BUCKETS)
    assert first.total_bytes - first.used_bytes > 250_000


def test_buckets_that_are_put_off_are_prepared_by_all_ranks_or_by_none(model_path, ranked):
    backend = loaded(ranked, model_path("llama"), warmup_required=1, warmup_quiet_s=0.0)
    backend.warm_up(BUCKETS)
    first, second = backend.ranks.all
    # The clock of one says that it is too early.
    second._warm_up.pace.allows = lambda *, is_idle: False
    assert backend.ranks.call(lambda rank: rank.warm_up_rest(is_idle=True)) == [(), ()]
    del second._warm_up.pace.allows
    prepared = backend.ranks.call(lambda rank: rank.warm_up_rest(is_idle=True))
    assert prepared[0] == prepared[1]
    assert len(prepared[0]) == 1
    assert first._capture.graphs == second._capture.graphs


def test_an_error_of_one_rank_ends_what_others_wait_for(model_path, ranked, monkeypatch):
    backend = loaded(ranked, model_path("llama"))
    monkeypatch.setattr(backend.ranks.all[1]._runner, "run", lambda *_, **__: 1 / 0)
    driver = drive(backend, PLAN, BUCKETS, tiny_models.prompt(20))
    with pytest.raises(ZeroDivisionError):
        driver.step([Work(0)])
