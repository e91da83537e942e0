"""Whole experts on each of several ranks: modules, whole backends next to transformers, and counts of tokens."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from support.backends import tiny_models
from support.backends.gguf_mixtures import FORMS, save_gguf_mixture
from support.backends.passes import make_pass
from support.backends.rank_threads import Forbidden, make_groups
from support.backends.torch_backends import PLAN, PROMPTS, load_torch, logits_of, make_torch
from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.records import Bucket, ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.linear.experts import PackedExperts
from trencadis_torch.loading.loader import find_model
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.parallel import experts as module
from trencadis_torch.parallel.experts import ExpertLoads, OwnExperts, load_metrics
from trencadis_torch.parallel.placement import ExpertSlots
from trencadis_torch.parallel.sharding import shard

KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
LAYERS = 3
TOP = 2
"""Experts of a token, in each of these models."""


@pytest.fixture
def both_ways(request, monkeypatch):
    """Lets experts compute as on a device, if that is asked for."""
    if request.param == "device":
        monkeypatch.setattr(OwnExperts, "_compute_own", OwnExperts._compute_all)


ways = pytest.mark.parametrize("both_ways", ["cpu", "device"], indirect=True)

# --------------------------------------------------------------------------------------------------- modules


class Scales(nn.Module):
    """Experts that scale their input, each by another number, and add one; counts its rows."""

    def __init__(self, own):
        super().__init__()
        self.num_experts, self.rows = len(own), 0
        self.scales = nn.Parameter(torch.tensor([float(expert + 1) for expert in own]), requires_grad=False)

    def forward(self, x, places, shares):
        assert places.shape == shares.shape == (len(x), 1)
        assert len(x)
        assert int(places.min()) >= 0
        assert int(places.max()) < self.num_experts
        self.rows += len(x)
        return (x * self.scales[places] + 1) * shares


SLOTS = {
    "linear": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mixed": ((7, 2), (0, 5), (1, 3), (6, 4)),
    "copies": ((0, 1, 2), (0, 3, 4), (5, 6, 0), (7, 5, 0)),
    "copies on one rank": ((0, 0, 1), (2, 3, 4), (5, 5, 6), (7, 6, 0)),
}


def scaled(hidden, experts, weights):
    return ((hidden[:, None] * (experts[..., None] + 1.0) + 1) * weights[..., None]).sum(1)


@ways
@pytest.mark.representatives(8)
@pytest.mark.parametrize("routes", [[[0, 7], [2, 4], [3, 5]], [[1, 0]], [[6, 7]]])
@pytest.mark.parametrize("slots", SLOTS)
def test_each_route_is_computed_by_one_rank(ranks, both_ways, slots, routes):
    hidden, experts = torch.randn(len(routes), 4), torch.tensor(routes)
    weights = torch.rand(len(routes), 2)

    def make(groups):
        own = SLOTS[slots]
        return OwnExperts(Scales(own[groups.rank]), ExpertSlots(num_experts=8, ranks=own), groups.tensor)

    started = ranks(make, 4)
    for one in started.call(lambda module: module(hidden, experts, weights)):
        torch.testing.assert_close(one, scaled(hidden, experts, weights))
    if OwnExperts._compute_own is not OwnExperts._compute_all:
        assert sum(module.local.rows for module in started.all) == experts.numel()
    assert [group.tensor.num_calls["all_reduce"] for group in started.groups] == [1] * 4


def test_what_an_expert_of_another_rank_would_overflow_with_is_left_out(ranks, monkeypatch):
    monkeypatch.setattr(OwnExperts, "_compute_own", OwnExperts._compute_all)

    class Squares(Scales):
        def forward(self, x, places, shares):
            return x * x * shares

    def make(groups):
        own = ((0,), (1,))
        return OwnExperts(Squares(own[groups.rank]), ExpertSlots(num_experts=2, ranks=own), groups.tensor)

    hidden = torch.tensor([[1e30], [3.0]])
    found = ranks(make, 2).call(lambda one: one(hidden, torch.tensor([[0], [1]]), torch.ones(2, 1)))
    assert found[0].tolist() == [[float("inf")], [9.0]]


def test_copies_share_the_tokens_of_an_expert_and_a_token_is_computed_alike_in_every_batch(ranks):
    own = tuple((0, *range(1 + 8 * rank, 9 + 8 * rank)) for rank in range(4))
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(8000, 33, generator=generator).topk(4).indices

    def make(groups):
        return OwnExperts(nn.Identity(), ExpertSlots(num_experts=33, ranks=own), groups.tensor)

    found = [one._places_of(experts) for one in ranks(make, 4).all]
    assert ((torch.stack(found) >= 0).sum(0) == 1).all()
    of_zero = torch.stack([((places >= 0) & (experts == 0)).sum() for places in found])
    assert (of_zero - of_zero.float().mean()).abs().max() < 0.15 * of_zero.float().mean()
    for one, places in zip(ranks(make, 4).all, found, strict=True):
        for token in (experts == 0).any(1).nonzero().flatten()[:20].tolist():
            assert torch.equal(one._places_of(experts[token : token + 1]), places[token : token + 1])


# --------------------------------------------------------------------------------------------------- backends


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return a function that saves a tiny mixture of experts; DeepSeek-V3 with groups, of which one is chosen."""
    root = tmp_path_factory.mktemp("mixtures")

    def save(kind):
        if (root / kind).is_dir():
            return root / kind
        if kind != "deepseek_v3":
            return tiny_models.save_model(kind, root)
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            **tiny_models._COMMON,
            "head_dim": 4,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": TOP,
            "moe_intermediate_size": 40,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        }
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="eager")
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.1)
        model.save_pretrained(root / kind)
        return root / kind

    return save


@pytest.fixture
def balanced(tmp_path):
    """Return a function that gives options with loads that put experts elsewhere, and copies of the busiest."""

    def options(redundant=4):
        path = tmp_path / "loads.json"
        path.write_text(json.dumps({str(layer): [2, 9, 1 + layer, 4] for layer in range(LAYERS)}))
        return {"expert_placement": "balanced", "expert_loads": str(path), "redundant_experts": redundant}

    return options


def loaded(ranked, path, size, layout="ragged", **options):
    backend = ranked(functools.partial(make_torch, layout, **options), size, expert=size)
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    return backend


@ways
@pytest.mark.representatives(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("placement", ["linear", "balanced"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_one_process(mixture, ranked, balanced, both_ways, kind, placement, size):
    path = mixture(kind)
    backend = loaded(ranked, path, size, **(balanced() if placement == "balanced" else {}))
    expected = logits_of(load_torch(path))
    for rank in backend.ranks.call(logits_of):
        assert float((rank - expected).norm() / expected.norm()) <= 1e-5
    texts = {row: tiny_models.greedy_reference(path, tokens, 8) for row, tokens in PROMPTS.items()}
    for chunk in (0, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 8, chunk=chunk) == texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_exchanges_as_often_as_under_tensor_parallelism(mixture, ranked, kind):
    path = mixture(kind)
    found = []
    for expert in (1, 2):
        backend = ranked(make_torch, 2, expert=expert)
        backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
        backend.allocate(PLAN)
        driver = BackendDriver(backend, PLAN)
        driver.start(0, PROMPTS[0])
        for group in backend.ranks.groups:
            group.tensor.num_calls.clear()
        driver.step([Work(0)])
        found.append(dict(backend.ranks.groups[0].tensor.num_calls))
    has_plan_for_experts = kind != "gpt_oss"
    if not has_plan_for_experts:
        found[0]["all_reduce"] += LAYERS
        found[0]["all_reduce done"] = found[0]["all_reduce"]
    assert found[1] == found[0]


@pytest.mark.parametrize("expert", [2, 1])
def test_weights_in_mxfp4_stay_so_on_each_rank(tmp_path, ranked, expert):
    from safetensors.torch import load_file, save_file

    tiny_models.save_changed("gpt_oss", tmp_path, hidden_size=64, intermediate_size=64)
    weights = load_file(tmp_path / "model.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name in [one for one in weights if one.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            num_experts, num_inputs, num_outputs = weights.pop(name).shape
            shape = num_experts, num_outputs, num_inputs // 32
            weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    backend = ranked(make_torch, 2, expert=expert)
    backend.load(ModelSource(path=str(tmp_path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    expected = logits_of(load_torch(tmp_path))
    # gpt-oss has no plan for shares of experts: each rank has all of them.
    for rank, found in zip(backend.ranks.all, backend.ranks.call(logits_of), strict=True):
        assert float((found - expected).norm() / expected.norm()) <= 1e-5
        for one in (part for part in rank._model.modules() if isinstance(part, PackedExperts)):
            assert one.structure(1).num_experts == 4 // expert
            assert one.gates.form == one.down.form == "4 bit levels in groups of 32"


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("architecture", "expert"), [("llama", 2), ("llama", 1), ("gpt-oss", 2), ("qwen3moe", 1)])
def test_experts_of_gguf_files_are_held_as_there_by_each_rank(tmp_path, ranked, architecture, expert):
    pytest.importorskip("gguf")
    # 6 experts, and so many inputs that a rank's part is whole groups.
    path, _ = save_gguf_mixture(tmp_path, architecture, num_experts=6, inner_size=128)
    backend = ranked(make_torch, 2, expert=expert)
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    expected = logits_of(load_torch(path))
    for rank, found in zip(backend.ranks.all, backend.ranks.call(logits_of), strict=True):
        assert (
            float((found - expected).norm() / expected.norm()) <= 5e-3
        )  # rows are rounded, and sums of ranks have other low bits
        packed = [part for part in rank._model.modules() if isinstance(part, PackedExperts)]
        assert len(packed) == 2
        for one in packed:
            assert one.gates.form == one.values.form == one.down.form == FORMS[architecture]
            sizes = one.structure(1)
            assert (sizes.num_experts, sizes.inner_size) == ((3, 128) if expert == 2 else (6, 64))


def test_busy_experts_have_copies_and_each_rank_the_same_number(mixture, ranked, balanced):
    backend = loaded(ranked, mixture("mixtral"), 4, **balanced())
    for rank in backend.ranks.all:
        for name, one in rank._model.named_modules():
            if isinstance(one, OwnExperts):
                assert one.local.structure(1).num_experts == 2, name
                assert len(one.slots.copies()[1]) >= 3, "the busiest"
    linear = loaded(ranked, mixture("mixtral"), 4)
    sums = {one.kv_cache().layout.sums for one in (*backend.ranks.all, *linear.ranks.all)}
    assert len(sums) == 2, "sums of other experts have other low bits"


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_int8_rounds_what_it_rounds_under_tensor_parallelism(mixture, ranked, balanced, layout):
    backend = loaded(ranked, mixture("mixtral"), 2, layout, quantization="int8", **balanced(redundant=2))
    texts = {row: BackendDriver(backend, PLAN).generate({row: one}, 8)[row] for row, one in PROMPTS.items()}
    assert BackendDriver(backend, PLAN, seed=7).generate(PROMPTS, 8, chunk=7) == texts
    for rank in backend.ranks.all:
        experts = next(one for one in rank._model.modules() if isinstance(one, OwnExperts))
        assert experts.local.gates.form == experts.local.down.form == "int8"


# --------------------------------------------------------------------------------------------------- counts


def counted(backend):
    """Return the tokens of each expert by layer, and the balance of each layer, from the metrics of the output rank."""
    families = {one.name: one for one in text_string_to_metric_families(backend.ranks.all[0].metrics())}
    found: dict[int, dict[int, int]] = {}
    for sample in families["trencadis_torch_expert_tokens"].samples:
        found.setdefault(int(sample.labels["layer"]), {})[int(sample.labels["expert"])] = int(sample.value)
    ratios = {int(one.labels["layer"]): one.value for one in families["trencadis_torch_expert_balance_ratio"].samples}
    return {layer: [own[expert] for expert in range(4)] for layer, own in found.items()}, ratios


@torch.inference_mode()
def routed(path, texts):
    """Return how many tokens of some texts transformers routes to each expert, by layer."""
    model = tiny_models._loaded(path)
    counts: dict[int, np.ndarray] = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        counts[index] = np.zeros(4, np.int64)

        def note(_, inputs, own=counts[index]):
            own += np.bincount(inputs[1].flatten().numpy(), minlength=4)

        hooks.append(layer.mlp.experts.register_forward_pre_hook(note))
    for tokens in texts:
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {index: own.tolist() for index, own in counts.items()}


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("placement", ["linear", "balanced"])
def test_tokens_of_each_expert_are_counted_and_padding_is_not(mixture, ranked, balanced, layout, placement):
    path = mixture("qwen3_moe")
    options = balanced() if placement == "balanced" else {}
    backend = loaded(
        ranked, path, 2, layout, **options, **({"max_prefill_batch_size": 2} if layout == "padded" else {})
    )
    assert all(sum(own) == 0 for own in counted(backend)[0].values()), "checks and profile runs do not count"
    bucketed = BackendDriver(backend, PLAN)
    outputs = bucketed.generate(PROMPTS, 6, chunk=8)
    backend.embed([np.array(PROMPTS[0], np.int32)])
    found, ratios = counted(backend)
    expected = routed(path, [[*PROMPTS[row], *outputs[row][:-1]] for row in PROMPTS])
    assert found == expected
    assert ratios.keys() == expected.keys()
    if placement == "linear":
        for layer, own in expected.items():
            halves = own[0] + own[1], own[2] + own[3]
            assert ratios[layer] == pytest.approx(sum(halves) / 2 / max(halves))
    assert backend.ranks.all[1].metrics() == ""


def test_shares_of_experts_count_nothing(mixture, ranked):
    backend = ranked(make_torch, 2)
    backend.load(ModelSource(path=str(mixture("mixtral"))), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    BackendDriver(backend, PLAN).generate(PROMPTS, 2)
    assert backend.ranks.all[0].metrics() == ""


def test_layers_without_experts_have_nothing_to_count():
    loads = ExpertLoads(nn.Linear(2, 2))
    with loads.counting(np.ones(4, np.int64)):
        pass
    assert "expert=" not in loads.metrics()


def test_a_layer_without_tokens_is_even():
    slots = ExpertSlots(num_experts=2, ranks=((0,), (1,)))
    text = load_metrics({0: np.zeros(2, np.int64)}, {0: slots})
    assert 'trencadis_torch_expert_balance_ratio{layer="0"} 1.0' in text


def test_tokens_of_a_bucket_are_told_from_padding():
    one = make_pass(Bucket(3, 4, 1), [3, 1], [0, 0], [3, 1])
    assert module.real_tokens(one, padded=True).tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert module.real_tokens(one, padded=False).tolist() == [1, 1, 1, 1]


# --------------------------------------------------------------------------------------------------- refusals


def load_errors(ranks, path, options, size=2, **layout):
    def join(groups):
        backend = make_torch(**options[groups.rank])
        backend.join(groups)
        return backend

    source = ModelSource(path=str(path))
    return ranks(join, size, **layout).errors(lambda rank: rank.load(source, sampler=Forbidden()))


def test_ranks_that_read_other_loads_refuse_to_start(mixture, ranks, balanced, tmp_path):
    first, second = balanced(), balanced()
    second["expert_loads"] = str(tmp_path / "others.json")
    (tmp_path / "others.json").write_text(json.dumps({str(layer): [9, 1, 1, 1] for layer in range(LAYERS)}))
    errors = load_errors(ranks, mixture("mixtral"), [first, second], expert=2)
    assert isinstance(errors[1], ConfigValueError)
    assert "other loads on rank 1" in str(errors[1])
    assert isinstance(errors[0], ModelLoadError)


@pytest.mark.parametrize(("redundant", "said"), [(3, "7 with these"), (1, "5 with these")])
def test_copies_that_do_not_go_over_the_ranks_are_refused(mixture, ranks, balanced, redundant, said):
    for error in load_errors(ranks, mixture("mixtral"), [balanced(redundant)] * 2, expert=2):
        assert said in str(error)
        assert "0, 2, 4" in error.hint


def test_loads_of_another_model_are_refused(mixture, ranks, balanced):
    options = balanced()
    options["expert_loads"] = options["expert_loads"].replace("loads.json", "short.json")
    with open(options["expert_loads"], "w") as file:
        json.dump({"0": [1, 2, 3, 4]}, file)
    for error in load_errors(ranks, mixture("mixtral"), [options] * 2, expert=2):
        assert isinstance(error, ConfigValueError)
        assert "nothing of layer 1" in str(error)


def test_a_placement_without_whole_experts_is_refused(balanced):
    with pytest.raises(ConfigValueError, match="expert = 1"):
        make_torch(**balanced()).join(make_groups(2)[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expert_placement": "balanced"}, "without expert_loads"),
        ({"expert_loads": "loads.json"}, "expert_loads = 'loads.json'"),
        ({"redundant_experts": 2}, "redundant_experts = 2"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(ConfigValueError, match=said):
        make_torch(**options)


def test_a_plan_that_divides_no_experts_but_their_outputs_is_refused(mixture):
    model = skeleton(find_model(ModelSource(path=str(mixture("mixtral")))))
    plan = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    plan |= dict.fromkeys(
        ("model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"), "replicate"
    )
    with pytest.raises(ModelLoadError, match="grouped_gemm"):
        shard(model, make_groups(2)[0].tensor, plan)
