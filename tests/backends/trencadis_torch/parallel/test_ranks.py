"""Backends of several ranks next to one of one rank, and next to transformers."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from support.backends import tiny_encoders, tiny_models
from support.backends.families import DIFFERING_KV_HEADS, MIXTURES, SERVED, save_family, save_with_biases
from support.backends.passes import make_pass
from support.backends.quantised_checkpoints import FORMATS, quantise_checkpoint
from support.backends.rank_threads import Forbidden, make_groups
from support.backends.torch_backends import PLAN, PROMPTS, load_torch, logits_of, make_torch
from trencadis.errors import (
    BackendError,
    CollectiveError,
    ConfigValueError,
    ModelLoadError,
    SamplingFailedError,
    StepFailedError,
)
from trencadis.interfaces import SupportsRanks
from trencadis.records import Batch, Bucket, ModelSource, Phase, SamplingParams, TableWrites
from trencadis_testing.backend import ArgmaxSampler, BackendConformance
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.linear.experts import PackedExperts
from trencadis_torch.linear.native import native
from trencadis_torch.parallel.experts import OwnExperts

needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")

PAGE = (Path(__file__).parents[4] / "docs/do/parallel.md").read_text()
PLANS = dict(
    zip(("gpt2", "opt", "gpt_oss", "deepseek_v3"), re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL), strict=True)
)
"""Plans that the page shows."""


def loaded(ranked, path, size, layout="ragged", plan=PLAN, pipeline=1, expert=1, **options):
    backend = ranked(functools.partial(make_torch, layout, **options), size, pipeline=pipeline, expert=expert)
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(plan)
    return backend


def assert_same_logits(ranked, path, size, **options):
    expected = logits_of(load_torch(path, plan=None))
    found = loaded(ranked, path, size, **options).ranks.call(logits_of)
    for rank in found:
        assert float((rank - expected).norm() / expected.norm()) <= 1e-5
        assert torch.equal(rank, found[0])


class TestTwo(BackendConformance):
    kind, size, layout, expert, pipeline, options = "gemma3", 2, "ragged", 1, 1, {}

    @pytest.fixture(autouse=True)
    def _model(self, model_path, ranked):
        self.path, self._ranked = model_path(self.kind), ranked
        self.source = ModelSource(path=str(self.path))

    def make(self):
        one = functools.partial(make_torch, self.layout, **self.options)
        return self._ranked(one, self.size, pipeline=self.pipeline, expert=self.expert)

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


class TestFourWithTwoKVHeadsPadded(TestTwo):
    kind, size, layout, options = "llama", 4, "padded", {"max_prefill_batch_size": 2}


class TestTwoWithExperts(TestTwo):
    kind = "qwen3_moe"


class TestTwoWithWholeExpertsPadded(TestTwo):
    kind, expert, layout = "mixtral", 2, "padded"


class TestTwoStages(TestTwo):
    kind, size, pipeline = "qwen3", 1, 2


class TestThreeStagesOfTwoPadded(TestTwo):
    kind, pipeline, layout = "gemma2", 3, "padded"


@pytest.mark.representatives(3)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [one for one in tiny_models.ARCHITECTURES if one != "gpt2"])
def test_greedy_tokens_are_those_of_transformers_and_rows_are_the_same_everywhere(
    model_path, ranked, kind, size, layout
):
    path = model_path(kind)
    expected = {row: tiny_models.greedy_reference(path, tokens, 12) for row, tokens in PROMPTS.items()}
    backend = loaded(ranked, path, size, layout, max_prefill_batch_size=2)
    for chunk in (0, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 12, chunk=chunk) == expected
    rows = [rank._rows.tokens for rank in backend.ranks.all]
    assert all(torch.equal(one, rows[0]) for one in rows)


def in_turn(kinds, sizes):
    """Return each kind with one of the sizes."""
    return [*zip(kinds, itertools.cycle(sizes), strict=False)]


WITHOUT_PLAN = {
    *("biogpt", "bitnet", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "jetmoe", "modernbert-decoder", "opt", "persimmon"),
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize(("kind", "size"), in_turn([kind for kind in SERVED if kind not in WITHOUT_PLAN], [2, 4]))
def test_logits_are_those_of_one_rank(tmp_path, ranked, kind, size):
    assert_same_logits(ranked, save_with_biases(kind, tmp_path), size)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_kv_heads_of_its_own_where_there_are_enough(tmp_path, ranked, kind, size):
    path = tiny_models.save_changed(kind, tmp_path, seed=3, num_key_value_heads=4)
    assert_same_logits(ranked, path, size)
    backend = loaded(ranked, path, size)
    found = [rank.kv_cache().layout for rank in backend.ranks.all]
    each = 4 // size
    assert [(one.first_head, one.last_head) for one in found] == [(k * each, k * each + each) for k in range(size)]
    assert len({(one.numerics, one.sums) for one in found}) == 1
    alone = load_torch(path)
    facts = alone._facts
    assert alone.kv_cache().layout.numerics == found[0].numerics
    assert (alone.kv_cache().layout.sums, found[0].sums) == ("", f"+tp{size}")
    assert all(one._facts.kv_bytes_per_token * size == facts.kv_bytes_per_token for one in backend.ranks.all)


@pytest.mark.parametrize(("kind", "expected"), [("llama", [(0, 1), (0, 1), (1, 2), (1, 2)]), ("gpt_oss", [(0, 2)] * 4)])
def test_kv_heads_that_several_ranks_have_are_named_alike(model_path, ranked, kind, expected):
    backend = loaded(ranked, model_path(kind), 4)
    layouts = [rank.kv_cache().layout for rank in backend.ranks.all]
    assert [(one.first_head, one.last_head) for one in layouts] == expected


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "deepseek_v3", "gpt_oss"])
@pytest.mark.representatives(1)
def test_a_configured_plan_divides_what_transformers_does_not(tmp_path, ranked, kind, size):
    path, plan = save_with_biases(kind, tmp_path), tmp_path / "plan.json"
    plan.write_text(PLANS[kind])
    assert_same_logits(ranked, path, size, tensor_plan=str(plan))
    backend = loaded(ranked, path, size, tensor_plan=str(plan))
    alone = load_torch(path, plan=None)
    facts = alone._facts
    assert all(rank._share.divided_ratio > 0.7 for rank in backend.ranks.all)
    assert all(rank._facts.weights_bytes < 0.8 * facts.weights_bytes for rank in backend.ranks.all)
    assert all(rank._facts.num_parameters == facts.num_parameters for rank in backend.ranks.all)


@needs_native
@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"pack": "off"}, {"attention": "sdpa"}, {"kv_dtype": "int8"}]
)
def test_other_kinds_of_weights_and_attention_run_on_shares(model_path, ranked, options):
    backend = loaded(ranked, model_path("llama"), 2, **options)
    alone = {}
    for row, tokens in PROMPTS.items():
        alone[row] = BackendDriver(backend, PLAN).generate({row: tokens}, 8)[row]
    assert BackendDriver(backend, PLAN, seed=7).generate(PROMPTS, 8, chunk=7) == alone
    if not options.keys() & {"quantization", "kv_dtype"}:
        expected = {
            row: tiny_models.greedy_reference(model_path("llama"), tokens, 8) for row, tokens in PROMPTS.items()
        }
        assert alone == expected


@needs_native
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_modules_of_shares_are_packed_and_fused_as_those_of_a_whole_model(model_path, ranked, kind):
    alone = load_torch(model_path(kind), plan=None)
    expected = alone._replacement
    for rank in loaded(ranked, model_path(kind), 2).ranks.all:
        assert (rank._replacement.num_linears, rank._replacement.num_fused) == (
            expected.num_linears,
            expected.num_fused,
        )


def test_sixteen_bits_run_on_shares(model_path, ranked):
    backend = ranked(make_torch, 2)
    facts = backend.load(ModelSource(path=str(model_path("llama")), dtype="bfloat16"), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    assert facts.dtype == "bfloat16"
    assert len(BackendDriver(backend, PLAN).generate({0: PROMPTS[0]}, 4)[0]) == 4


# --------------------------------------------------------------------------------------------------- whole experts


@pytest.mark.representatives(2, ci=3)
@pytest.mark.parametrize(("kind", "size"), in_turn(MIXTURES, [2, 4]))
def test_ranks_may_have_whole_experts(tmp_path, ranked, kind, size):
    path = save_with_biases(kind, tmp_path)
    assert_same_logits(ranked, path, size, expert=size)
    backend = loaded(ranked, path, size, expert=size)
    experts = [one.local for one in backend.ranks.all[0]._model.modules() if isinstance(one, OwnExperts)]
    packed = [one.structure(1).num_experts for one in experts if isinstance(one, PackedExperts)]
    stacked = [len(parameter) for one in experts for parameter in one.parameters() if parameter.dim() > 1]
    assert {*packed, *stacked} == {4 // size}
    assert not stacked or native() is None
    if kind in DIFFERING_KV_HEADS:
        with pytest.raises(BackendError, match="differ in their KV heads"):
            backend.ranks.all[0].kv_cache()
    else:
        assert all("+ep" in rank.kv_cache().layout.sums for rank in backend.ranks.all)


@pytest.mark.parametrize(("kind", "name"), [("llama", "Llama"), ("gemma4_text", "Gemma4")])
def test_a_model_without_experts_has_none_to_divide(tmp_path, ranks, kind, name):
    """The plan of the latter has some."""
    for error in load_errors(ranks, save_family(kind, tmp_path), expert=2):
        assert f"{name}ForCausalLM has no experts" in str(error)


# --------------------------------------------------------------------------------------------------- stages

WITHOUT_STAGES = WITHOUT_PLAN | {
    *("granitemoe", "granitemoeshared", "hunyuan_v1_dense", "nanochat", "olmoe", "phimoe"),
}
READS_EMBEDDINGS = {"gemma3n_text", "gemma4_text"}
"""Every layer gets something computed of the embeddings."""


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    ("kind", "size"), in_turn([kind for kind in SERVED if kind not in WITHOUT_STAGES | READS_EMBEDDINGS], [1, 2])
)
def test_the_last_of_two_stages_has_the_logits_of_one_rank(tmp_path, ranked, kind, size):
    path = save_with_biases(kind, tmp_path)
    one = load_torch(path, plan=None)
    facts = one._facts
    expected = logits_of(one)
    backend = loaded(ranked, path, size, pipeline=2)
    for rank in backend.ranks.call(logits_of)[size:]:
        assert float((rank - expected).norm() / expected.norm()) <= 1e-5
    layers = [[layer.index for layer in rank._layers] for rank in backend.ranks.all]
    assert layers[0] + layers[-1] == [layer.index for layer in one._layers]
    assert all(rank._facts.weights_bytes < facts.weights_bytes for rank in backend.ranks.all)
    if size == 1:
        assert torch.equal(backend.ranks.call(logits_of)[-1], expected)
        assert sum(rank._facts.kv_bytes_per_token for rank in backend.ranks.all) == facts.kv_bytes_per_token


@pytest.mark.parametrize("pipeline", [2, 3])
def test_stages_of_several_layers_and_tied_embeddings_are_those_of_one_rank(tmp_path, ranked, pipeline):
    path = tiny_models.save_changed("llama", tmp_path, num_hidden_layers=7, tie_word_embeddings=pipeline == 2)
    backend = loaded(ranked, path, 1, pipeline=pipeline)
    assert min(len(rank._layers) for rank in backend.ranks.all) >= 2
    assert torch.equal(backend.ranks.call(logits_of)[-1], logits_of(load_torch(path, plan=None)))


def test_stages_with_a_vocabulary_have_fewer_layers(tmp_path, ranked):
    path = tiny_models.save_changed("llama", tmp_path, num_hidden_layers=9, vocab_size=2000)
    first, middle, last = (len(rank._layers) for rank in loaded(ranked, path, 1, pipeline=3).ranks.all)
    assert first < middle > last


@pytest.mark.parametrize("kind", sorted(READS_EMBEDDINGS))
def test_a_model_whose_layers_read_embeddings_has_no_stages(tmp_path, ranks, kind):
    for error in load_errors(ranks, save_family(kind, tmp_path), size=1, pipeline=2):
        assert isinstance(error, ModelLoadError)
        assert "differ from the model's own" in str(error)


@pytest.mark.parametrize("kind", sorted(WITHOUT_STAGES))
def test_a_model_without_a_plan_of_stages_is_refused(tmp_path, ranks, kind):
    for error in load_errors(ranks, save_family(kind, tmp_path), size=1, pipeline=2):
        assert "comes without a plan of stages" in str(error)


def test_more_stages_than_layers_are_refused(model_path, ranks):
    for error in load_errors(ranks, model_path("llama"), size=1, pipeline=4):
        assert "pipeline = 4: LlamaForCausalLM has 3 layers" in str(error)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_texts_are_embedded_on_every_rank_or_by_the_last_stage(model_path, ranked, pipeline):
    backend = ranked(make_torch, 2, pipeline=pipeline)
    assert backend.load(ModelSource(path=str(model_path("gemma2"))), sampler=ArgmaxSampler()).embedding_size == 48
    found = backend.embed([np.array(tokens, np.int32) for tokens in PROMPTS.values()])
    expected = [
        tiny_encoders.reference_vector(model_path("gemma2"), tokens, "last").numpy() for tokens in PROMPTS.values()
    ]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@needs_native
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"pack": "off"}, {"kv_dtype": "int8"}])
def test_stages_of_other_kinds_of_weights_are_those_of_one_rank(model_path, ranked, options):
    one = load_torch(model_path("llama"), plan=None, **options)
    found = loaded(ranked, model_path("llama"), 1, pipeline=2, **options).ranks.call(logits_of)[-1]
    assert torch.equal(found, logits_of(one))


# --------------------------------------------------------------------------------------------------- samples, scores
def test_tokens_that_are_not_the_likeliest_reach_every_rank(model_path, ranked):
    """A rank that took the likeliest token of its own logits would go on with another text."""

    class Third(ArgmaxSampler):
        def sample(self, logits, context):
            found = super().sample(logits, context)
            return attrs.evolve(found, token_ids=logits.topk(3).indices[:, 2])

    texts = []
    for backend in (ranked(make_torch, 2), make_torch()):
        backend.load(ModelSource(path=str(model_path("llama"))), sampler=Third())
        backend.allocate(PLAN)
        texts.append(BackendDriver(backend, PLAN).generate(PROMPTS, 8))
    assert texts[0] == texts[1]


def test_prompts_are_scored_by_the_rank_that_samples(model_path, ranked):
    found = []
    for backend in (loaded(ranked, model_path("llama"), 2), load_torch(model_path("llama"))):
        driver = BackendDriver(backend, PLAN)
        driver.start(0, PROMPTS[0], params=SamplingParams(temperature=0.0, prompt_logprobs=2))
        found.append(driver.step([Work(0)]).prompt_logprobs)
    assert len(found[0]) == len(PROMPTS[0]) - 1
    for one, other in zip(*found, strict=True):
        assert (one.token_id, one.rank, one.top_token_ids) == (other.token_id, other.rank, other.top_token_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_one_broadcast_a_pass_brings_the_tokens(model_path, ranked):
    backend = loaded(ranked, model_path("llama"), 2)
    driver = BackendDriver(backend, PLAN)
    driver.start(0, PROMPTS[0])
    driver.step([Work(0)])
    groups = [group.tensor for group in backend.ranks.groups]
    for group in groups:
        group.num_calls.clear()
    driver.step([Work(0)])
    assert [group.num_calls["broadcast"] for group in groups] == [1, 1]
    assert [group.num_calls["all_gather"] for group in groups] == [1, 1]
    # Embeddings, and two for each of three layers; each is two meetings of these threads.
    assert [group.num_calls["all_reduce"] for group in groups] == [7, 7]


@pytest.mark.parametrize(
    ("work", "num_broadcasts"), [(Work(0, drafts=(3, 4)), 0), (Work(0, drafts=(3, 4), parents=(-1, -1)), 1)]
)
def test_stages_wait_for_the_tokens_of_the_last_one_only_if_drafts_branch(model_path, ranked, work, num_broadcasts):
    backend = loaded(ranked, model_path("llama"), 1, pipeline=2, plan=attrs.evolve(PLAN, max_draft_tokens=2))
    driver = BackendDriver(backend, PLAN)
    driver.start(0, PROMPTS[0])
    driver.step([Work(0)])
    groups = [group.world for group in backend.ranks.groups]
    for group in groups:
        group.num_calls.clear()
    driver.step([work])
    assert [dict(group.num_calls) for group in groups] == [{"broadcast": 1} if num_broadcasts else {}] * 2


# --------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("size", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.representatives(3)
def test_a_sampler_that_fails_ends_the_step_and_not_the_group(model_path, ranked, size, pipeline, layout):
    class Fails(ArgmaxSampler):
        fails = False

        def sample(self, logits, context):
            if self.fails:
                raise StepFailedError("no token")
            return super().sample(logits, context)

    sampler, backend = Fails(), ranked(functools.partial(make_torch, layout), size, pipeline=pipeline)
    backend.load(ModelSource(path=str(model_path("llama"))), sampler=sampler)
    backend.allocate(PLAN)
    driver = BackendDriver(backend, PLAN)
    for row in (0, 1):
        driver.start(row, PROMPTS[row])
    driver.step([Work(0)])
    sampler.fails = True
    with pytest.raises(StepFailedError, match="no token") as failure:
        driver.step([Work(0), Work(1)])  # of padded passes the first one fails, and the other stage has sent both
    assert isinstance(failure.value, SamplingFailedError) == (pipeline > 1)
    sampler.fails = False
    assert BackendDriver(backend, PLAN).generate(PROMPTS, 6) == {
        row: tiny_models.greedy_reference(model_path("llama"), tokens, 6) for row, tokens in PROMPTS.items()
    }


@pytest.mark.parametrize(("size", "pipeline", "broken"), [(2, 1, 1), (1, 2, 0), (1, 2, 1)])
def test_an_error_of_one_rank_ends_what_the_others_wait_for(model_path, ranked, size, pipeline, broken):
    backend = loaded(ranked, model_path("llama"), size, pipeline=pipeline)
    backend.ranks.all[broken]._runner = None
    none = np.empty(0, np.int32)
    writes = TableWrites(rows=none, columns=none, block_ids=none)
    passes = (make_pass(Bucket(1, 1, 1, Phase.DECODE), [0], [0], [1]),)
    one = Batch(step=0, num_sequences=1, row_starts=(), table_writes=writes, passes=passes)
    errors = backend.ranks.errors(lambda rank: rank.submit(one))
    assert "after close" in str(errors[broken])
    # The first of two stages does not wait for the last one.
    assert errors[0] is None if (pipeline, broken) == (2, 1) else isinstance(errors[1 - broken], CollectiveError)
    assert backend.ranks.groups[broken].tensor.was_aborted
    assert backend.ranks.groups[broken].world.was_aborted


def load_errors(ranks, path, size=2, break_rank=None, pipeline=1, expert=1, **options):
    def join(groups):
        backend = make_torch(**options)
        backend.join(groups)
        if groups.rank == break_rank:
            backend._share._plan = {"lm_head": "replicate", "nothing": "colwise"}
        return backend

    source = ModelSource(path=str(path))
    return ranks(join, size, pipeline=pipeline, expert=expert).errors(
        lambda rank: rank.load(source, sampler=Forbidden())
    )


def test_a_share_that_cannot_be_loaded_is_an_error_on_every_rank(model_path, ranks):
    first, second = load_errors(ranks, model_path("llama"), break_rank=1)
    assert isinstance(second, ConfigValueError)
    assert isinstance(first, ModelLoadError)
    assert "another rank" in str(first)


def test_logits_that_differ_on_one_rank_are_an_error_on_every_rank(model_path, ranks, monkeypatch):
    from trencadis_torch.loading import self_check

    compare, threads = self_check._disagreement, []

    def disagree(*args, **options):
        threads.append(threading.get_ident())
        found = compare(*args, **options)
        return "by 3 of their spread" if threads[0] == threading.get_ident() else found

    monkeypatch.setattr(self_check, "_disagreement", disagree)
    errors = load_errors(ranks, model_path("llama"))
    assert all(isinstance(one, ModelLoadError) for one in errors)
    assert sorted("on another rank" in str(one) for one in errors) == [False, True]


def test_numbers_of_ranks_that_heads_do_not_go_over_are_refused(model_path, ranks):
    for error in load_errors(ranks, model_path("llama"), size=3):
        assert "tensor = 3" in str(error)
        assert "4 query heads and 2 KV heads" in str(error)
        assert error.hint.endswith(": 1, 2, 4.")


@pytest.mark.parametrize("kind", sorted(WITHOUT_PLAN))
def test_a_model_without_a_plan_is_refused(tmp_path, ranks, kind):
    assert all("comes without a plan" in str(error) for error in load_errors(ranks, save_family(kind, tmp_path)))


def test_a_model_that_only_embeds_is_refused(tmp_path, ranks):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    for error in load_errors(ranks, path):
        assert isinstance(error, BackendError)


def test_experts_over_some_of_the_ranks_are_refused():
    with pytest.raises(BackendError, match="expert = 2 with tensor = 4"):
        make_torch().join(make_groups(4, expert=2)[0])


@pytest.mark.parametrize(
    "options", [{"graphs": "checked", "layout": "padded"}, {"compile": "buckets", "layout": "padded"}]
)
@pytest.mark.parametrize(("layout", "said"), [((2, 1), "tensor = 2"), ((1, 2), "pipeline = 2")])
def test_graphs_are_refused(options, layout, said):
    tensor, pipeline = layout
    with pytest.raises(ConfigValueError, match=said):
        make_torch(**options).join(make_groups(tensor, pipeline=pipeline)[0])


# --------------------------------------------------------------------------------------------------- facts


def test_a_group_of_one_is_no_group(model_path):
    backend = make_torch()
    backend.join(make_groups(1)[0])
    backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    assert BackendDriver(backend, PLAN).generate(PROMPTS, 4) == {
        row: tiny_models.greedy_reference(model_path("llama"), tokens, 4) for row, tokens in PROMPTS.items()
    }
    assert backend.kv_cache().blender() is not None


def test_the_backend_says_with_what_it_computes_among_others():
    backend = make_torch()
    assert isinstance(backend, SupportsRanks)
    assert backend.capabilities.collectives == ("shared_memory", "gloo")


def test_memory_and_weights_are_those_of_one_rank(model_path, ranked):
    alone = load_torch(model_path("llama"), plan=None)
    facts = alone._facts
    report = alone.memory(max_num_batched_tokens=64, max_num_seqs=4)
    backend = ranked(make_torch, 4)
    backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    found = backend.memory(max_num_batched_tokens=64, max_num_seqs=4)
    assert found.total_bytes == report.total_bytes // 4
    assert all(rank._facts.weights_bytes < 0.5 * facts.weights_bytes for rank in backend.ranks.all)


def test_the_log_says_what_is_where(model_path, ranked, caplog):
    with caplog.at_level("INFO", "trencadis.torch"):
        loaded(ranked, model_path("llama"), 2, pipeline=2)
    assert "Ranks divide 100 % of the parameters. Layers 0 to 1 are here." in caplog.text
    assert "Layers 2 to 2 are here." in caplog.text
    assert "LlamaForCausalLM runs layer by layer" in caplog.text


def test_tokens_that_are_blended_are_no_matter_of_ranks(model_path, ranked):
    backend = loaded(ranked, model_path("llama"), 2)
    assert all(rank.kv_cache().blender() is None for rank in backend.ranks.all)


def test_ranks_share_the_cores(model_path, ranked, monkeypatch):
    from trencadis_torch import backend as module

    monkeypatch.setattr(module, "SINGLE_THREAD_PARAMETERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    loaded(ranked, model_path("llama"), 4)
    assert set(asked) == {3}
    assert len(asked) >= 4


@needs_native
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gptq", {"size": 2}), ("gptq", {"size": 1, "pipeline": 2}), ("compressed_int8", {"size": 1, "pipeline": 2})],
    ids=str,
)
def test_shares_of_a_quantised_checkpoint_are_held_as_it_is_and_give_the_tokens_of_one_rank(
    ranked, tmp_path, kind, layout
):
    # So that no group is cut.
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    plain, path = tiny_models.save_changed("llama", tmp_path / "plain", seed=3, **sizes), tmp_path / "quantised"
    quantise_checkpoint(plain, FORMATS[kind], path, tmp_path / "reference")
    one = load_torch(path)
    backend = loaded(ranked, path, **layout)
    assert BackendDriver(backend, PLAN).generate(PROMPTS, 8) == BackendDriver(one, PLAN).generate(PROMPTS, 8)
    for rank in backend.ranks.all:
        assert ("int4 in groups of 16 (" if kind == "gptq" else " int8 (") in rank._facts.description


def test_shares_that_a_rank_cannot_load_layer_by_layer_are_loaded_whole_on_every_rank(ranked, tmp_path):
    """The first stage alone has experts whose code reads the weights of linear layers."""
    path = save_family("sarvam_moe", tmp_path)
    backend = loaded(ranked, path, 1, pipeline=2)
    for rank in backend.ranks.all:
        assert "loaded whole: " in rank._facts.description
        assert re.search("reads weights of linear layers|another rank cannot", rank._facts.description)


def test_a_forward_that_fails_on_one_stage_ends_all(ranked, model_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such operation")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", fail)
    with pytest.raises(ModelLoadError, match=r'one after the other, failed: .*no such operation.* pack = "off"'):
        loaded(ranked, model_path("llama"), 1, pipeline=2)
