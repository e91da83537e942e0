"""Whole modules against those of transformers, on what goes through a model; what builds them is in test_surgery.py."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from support.backends import families, tiny_models
from support.backends.one_call import errors_in_one_call
from trencadis.errors import BackendError, ModelLoadError
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.linear.decoder import decoder_of, how_it_runs
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.heads import How
from trencadis_torch.linear.native import KINDS, Product, native
from trencadis_torch.linear.native_decoder import (
    PARTS,
    Decoder,
    Layer,
    NativeDecoder,
    layer_array,
    native_decoder,
)
from trencadis_torch.linear.packed import FusedLinear, PackedLinear, RowsEmbedding
from trencadis_torch.linear.replacement import fuse_decoder, replace_modules
from trencadis_torch.linear.structure import Ending, Order, OtherwiseError, read_ending, scale_between
from trencadis_torch.linear.watch import watch
from trencadis_torch.loading import self_check
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.self_check import ModelCheck

needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")
LIBRARIES = [pytest.param(True, id="native", marks=needs_native), pytest.param(False, id="torch")]
FUSED = {
    "llama": (3, 3, 7),
    "qwen3": (3, 3, 7),
    "gemma3": (3, 3, 13),
    "phi3": (3, 3, 7),
    "mixtral": (3, 0, 7),
    "gpt2": (0, 0, 7),
}
"""How many attentions, MLPs and norms of a tiny model there are to fuse."""


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


def errors_after(model, *, quantised, library):
    """Return how far logits are from the model's own, at each position, over their spread."""
    layers = attention_layers(model)
    check = ModelCheck(model, layers, layout="ragged")
    replace_modules(model, quantization="int8" if quantised else "none", native=native() if library else None)
    check.compare(model, quantised=quantised, replaced=True)
    with torch.inference_mode():
        found = self_check.paged_logits(model, layers, check._sequences, "ragged")
    pairs = zip(check._expected, found, strict=True)
    return torch.cat([self_check._errors(expected, logits) for expected, logits in pairs])


@pytest.mark.representatives(6)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_logits_stay_those_of_transformers(kind, library):
    assert float(errors_after(tiny_models.make_model(kind), quantised=False, library=library).max()) < 3e-5


@pytest.mark.representatives(3)
@needs_native
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_int8_logits_are_near_those_of_transformers_but_not_equal(kind):
    errors = errors_after(tiny_models.make_model(kind), quantised=True, library=True)
    # Weights are drawn ten times as wide as usual: nothing is more sensitive to rounding.
    assert 1e-4 < float(errors.median()) < 0.15


@needs_native
def test_int4_logits_are_farther_from_those_of_transformers_than_int8_and_still_near():
    errors = {}
    for quantization in ("int8", "int4"):
        torch.manual_seed(7)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 131}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        layers = attention_layers(model)
        check = ModelCheck(model, layers, layout="ragged")
        done = replace_modules(model, quantization=quantization, native=native())
        assert done.kernels == f"{quantization}{native().panel}"
        forms = {part.form for part in model.modules() if isinstance(part, PackedLinear)}
        assert forms == {"int8" if quantization == "int8" else "int4 in groups of 32"}
        check.compare(model, quantised=True, replaced=True)
        with torch.inference_mode():
            found = self_check.paged_logits(model, layers, check._sequences, "ragged")
        pairs = zip(check._expected, found, strict=True)
        errors[quantization] = float(torch.cat([self_check._errors(*pair) for pair in pairs]).median())
    assert 1e-4 < errors["int8"] < errors["int4"] < 0.5


def count(model, kind):
    return sum(isinstance(part, kind) for part in model.modules())


@needs_native
@pytest.mark.parametrize("kind", FUSED)
def test_known_families_are_fused_and_others_packed_layer_by_layer(kind):
    model = tiny_models.make_model(kind)
    num_linears = sum(type(part) is nn.Linear for part in model.modules())
    done = replace_modules(model, native=native())
    assert (count(model, RotaryAttention), count(model, FusedMLP), count(model, FusedNorm)) == FUSED[kind]
    assert (done.num_linears, done.num_fused) == (num_linears, sum(FUSED[kind]))
    assert not any(type(part) is nn.Linear for part in model.modules())


@needs_native
def test_a_module_that_computes_something_else_under_a_known_name_stays():
    model = tiny_models.make_model("llama")
    odd = model.model.layers[1]
    plain = odd.mlp.forward
    odd.mlp.forward = lambda x: 1.01 * plain(x)
    norm = odd.input_layernorm.forward
    odd.input_layernorm.forward = lambda x: norm(x) + 0.01
    attend = odd.self_attn.forward
    odd.self_attn.forward = lambda **options: attend(**{**options, "hidden_states": options["hidden_states"] * 2})
    assert errors_after(model, quantised=False, library=True).max() < 3e-5
    assert type(odd.mlp).__name__ == "LlamaMLP"
    assert type(odd.input_layernorm).__name__ == "LlamaRMSNorm"
    assert type(odd.self_attn).__name__ == "LlamaAttention"
    assert isinstance(odd.mlp.gate_proj, PackedLinear)
    assert isinstance(model.model.layers[0].mlp, FusedMLP)


@needs_native
def test_linear_layers_of_another_class_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny_models.make_model("llama")
    odd = model.model.layers[0].mlp
    scaled = Scaled(48, 80, bias=False)
    scaled.weight = odd.up_proj.weight
    odd.up_proj = scaled
    assert errors_after(model, quantised=False, library=True).max() < 3e-5
    assert odd.up_proj is scaled


def test_replacement_that_goes_wrong_is_refused():
    model = tiny_models.make_model("llama")
    check = ModelCheck(model, attention_layers(model), layout="ragged")
    replace_modules(model, native=None)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj._bias = torch.ones(48)
    with pytest.raises(ModelLoadError, match="packed layers differ from the model's own") as caught:
        check.compare(model, replaced=True)
    assert 'pack = "off"' in caught.value.hint


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_whose_weight_the_models_code_reads_stays_and_the_others_are_packed(library, caplog):
    model = tiny_models.make_model("llama")
    check = ModelCheck(model, attention_layers(model), layout="ragged")
    layer = model.model.layers[0]
    plain = layer.forward
    layer.forward = lambda *args, **options: plain(*args, **options) + 0 * layer.mlp.up_proj.weight.sum()
    with caplog.at_level("INFO"):
        replace_modules(model, native=native() if library else None)
    assert type(layer.mlp.up_proj) is nn.Linear
    assert type(model.model.layers[1].mlp) is (FusedMLP if library else type(layer.mlp))
    assert isinstance(layer.mlp.down_proj, FusedLinear)
    assert "1 linear layers stay as they are" in caplog.text
    assert "(model.layers.0.mlp.up_proj: weight)" in caplog.text
    check.compare(model, replaced=True)


def test_a_forward_that_fails_with_packed_layers_is_said_in_words():
    model = tiny_models.make_model("llama")
    check = ModelCheck(model, attention_layers(model), layout="ragged")
    replace_modules(model, native=None)
    head = model.lm_head.forward

    def fail(x):
        raise IndexError(7) if x.shape[1] > 5 else AssertionError

    model.lm_head.forward = fail
    assert head is not fail
    with pytest.raises(ModelLoadError, match="a forward with packed layers failed: "):
        check.compare(model, replaced=True)


@needs_native
@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_shared_embeddings_stay_shared_and_bit_equal(kind):
    model = tiny_models.make_model(kind)
    model.config.tie_word_embeddings = True
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    ids = torch.tensor([[0, 3, 130]])
    expected = model.get_input_embeddings()(ids)
    before = sum(parameter.nbytes for parameter in model.parameters())
    done = replace_modules(model, native=native())
    assert isinstance(model.get_input_embeddings(), RowsEmbedding)
    assert torch.equal(model.get_input_embeddings()(ids), expected)
    padding = sum(
        (-part.out_features % native().panel) * part.in_features * 4
        for part in model.modules()
        if isinstance(part, FusedLinear)
    )
    assert done.weights_bytes == before + padding


@pytest.fixture
def quick_collections():
    """Collections look at what the test makes, not at what all tests before it have left."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("library", LIBRARIES)
def test_original_weights_are_let_go_layer_by_layer(library, monkeypatch):
    model = tiny_models.make_model("llama")
    alive, most = [weakref.ref(part.weight) for part in model.modules() if type(part) is nn.Linear], []
    total = len(alive)
    for kind in ("PackedLinear", "BlockedLinear"):
        made = getattr(__import__("trencadis_torch.linear.packed", fromlist=[kind]), kind)
        plain = made.__init__

        def noted(self, *args, plain=plain):
            plain(self, *args)
            done.append(self)
            gc.collect()
            most.append(sum(ref() is not None for ref in alive))

        monkeypatch.setattr(made, "__init__", noted)
    done = []
    replace_modules(model, native=native() if library else None)
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    # An attention of four layers is packed before its own are let go; never much more.
    assert all(left <= total - 4 * (index // 4) + 4 for index, left in enumerate(most))
    assert most[-1] <= 4


def test_nothing_of_a_copy_of_the_model_is_touched():
    model = tiny_models.make_model("qwen3")
    other = copy.deepcopy(model)
    replace_modules(model, native=None)
    assert type(other.lm_head) is nn.Linear


def fused(model, **changes):
    """Operate on a model and let it run in one call, if it does; return whether it does."""
    layers = attention_layers(model)
    replace_modules(model, native=native())
    kernel = choose_kernel("native", device=torch.device("cpu"), layout="ragged", layers=layers)
    return fuse_decoder(model, **{"layers": layers, "kernel": kernel, "native": native(), **changes})


@needs_native
@pytest.mark.parametrize(("kind", "expected"), [("llama", True), ("gemma2", True), ("gemma3", True), ("gpt2", False)])
def test_plain_decoders_run_in_one_call(kind, expected):
    model = tiny_models.make_model(kind)
    assert fused(model) is expected
    assert (decoder_of(model) is not None) is expected


@needs_native
def test_a_decoder_that_computes_something_else_in_one_call_runs_layer_by_layer(caplog):
    model = tiny_models.make_model("llama")
    plain = model.model.layers[1].forward

    def odd(x, **options):
        # The few tokens that were looked at show nothing of it.
        return plain(x, **options) * (1.01 if x.shape[1] > 8 else 1)

    model.model.layers[1].forward = odd
    with caplog.at_level("INFO", logger="trencadis.torch"):
        assert not fused(model)
    assert decoder_of(model) is None
    assert how_it_runs(model) == "layer by layer: in one call it computes something else"
    assert f"LlamaForCausalLM runs {how_it_runs(model)}" in caplog.text


@needs_native
@pytest.mark.parametrize("missing", ["kernel", "native"])
def test_without_its_libraries_nothing_runs_in_one_call(missing):
    model = tiny_models.make_model("llama")
    assert not fused(model, **{missing: None})
    assert decoder_of(model) is None


def linears(model):
    return {name: part for name, part in model.named_modules() if type(part) is nn.Linear}


def test_what_a_layer_reads_of_itself_is_no_read_by_others():
    model = tiny_models.make_model("qwen3")
    _, reads = watch(model, {}, linears(model))
    assert reads == {}


def test_attributes_that_another_module_reads_are_named():
    model = tiny_models.make_model("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) * (mlp.up_proj.out_features == mlp.gate_proj.weight.shape[0])
    _, reads = watch(model, {}, linears(model))
    assert reads == {
        "model.layers.1.mlp.up_proj": frozenset({"out_features"}),
        "model.layers.1.mlp.gate_proj": frozenset({"weight"}),
    }


def test_a_model_is_the_same_afterwards():
    model = tiny_models.make_model("llama")
    ids = torch.tensor([[3, 4, 5]])
    before, kinds = model(ids).logits, [type(part) for part in model.modules()]
    calls, _ = watch(model, {"model.norm": model.model.norm}, linears(model))
    assert [type(part) for part in model.modules()] == kinds
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    adapter.switch(model, "eager")
    assert torch.equal(model(ids).logits, before)
    assert calls["model.norm"].output.shape == (1, 5, model.config.hidden_size)


def test_a_forward_that_fails_leaves_no_trace():
    model = tiny_models.make_model("llama")
    kinds = [type(part) for part in model.modules()]
    model.lm_head.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        watch(model, {}, linears(model))
    assert [type(part) for part in model.modules()] == kinds


class Library:
    """Functions that return numbers."""

    def __init__(self, **numbers):
        for name in ("bytes", "parts", "widest", "scratch", "mixing"):
            setattr(self, f"trencadis_decoder_{name}", self.function(numbers.get(name, 0)))
        self.trencadis_decode = self.trencadis_guess = self.trencadis_draft = self.trencadis_follow = self.function(0)

    @staticmethod
    def function(number):
        return ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: number)


def test_a_library_of_other_structures_is_refused():
    with pytest.raises(BackendError, match="other structures"):
        NativeDecoder(Library(bytes=8, parts=len(PARTS)))


@needs_native
def test_sizes_follow_from_the_widest_input_and_from_what_is_quantised():
    layers = [Layer(), Layer()]
    layers[1].down.num_inputs = 90
    decoder = Decoder(layers=layer_array(layers), num_layers=2, hidden_size=48)
    widest, scratch = native_decoder().sizes(decoder)
    assert widest == 0
    assert scratch >= 4 * 90
    layers[1].down = Product(kind=KINDS["groups4"], group=30, zero=8, num_outputs=48, num_inputs=90)
    decoder.layers = layer_array(layers)
    widest, quantised = native_decoder().sizes(decoder)
    assert widest >= 90
    assert quantised >= scratch + widest


def test_without_a_compiler_there_is_a_line_in_the_log_and_no_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO", logger="trencadis.torch"):
        assert native_decoder.__wrapped__() is None
    assert "layers run one by one: decoder.cpp: no C++ compiler" in caplog.text
    assert torch.get_num_threads() > 0


MIXED = ["sliding_attention", "full_attention"]
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}
PUBLISHED = {
    "head size is not hidden size by heads": ("llama", {"head_dim": 20}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied embeddings": ("gemma3_text", {"tie_word_embeddings": True}),
    "local and global angles": ("gemma3_text", {"layer_types": MIXED, "sliding_window": 6}),
    "half of each head turned": (
        "glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "partly turned halves": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "global layers without rotation": ("cohere2", {"layer_types": MIXED, "sliding_window": 6, "logit_scale": 0.25}),
    "some layers without rotation": ("smollm3", {"no_rope_layers": [1, 0]}),
    "windows and norms of heads": ("exaone4", {"layer_types": MIXED, "sliding_window": 6}),
    "multipliers": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.1},
    ),
    "long texts": ("olmo3", {"layer_types": MIXED, "sliding_window": 6}),
    "scaled angles": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 30},
    ),
    "heads between each other, half of each turned": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "heads between each other, one sum after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "angles of Llama 3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "norms of heads, biases, half of each turned": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "a mixture with multipliers": (
        "granitemoe",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0, "attention_multiplier": 0.1},
    ),
    "queries scaled by their positions": (
        "ministral3",
        {"rope_parameters": {**MINISTRAL, "original_max_position_embeddings": 8}},
    ),
    "squared relu": ("jais2", {"hidden_act": "relu2"}),
    "exact gelu": ("starcoder2", {"hidden_act": "gelu"}),
}


@needs_native
@pytest.mark.representatives(6)
@pytest.mark.parametrize("kind", families.SERVED)
def test_families_run_in_one_call_or_say_why_not(kind):
    found = errors_in_one_call(families.make_family(kind))
    if kind in families.IN_ONE_CALL:
        assert found < 3e-5
    else:
        assert found.startswith("layer by layer: ")


@needs_native
@pytest.mark.representatives(4)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_structures_of_published_checkpoints_run_in_one_call(name, layout):
    kind, changes = PUBLISHED[name]
    assert errors_in_one_call(families.make_family(kind, **changes), layout=layout) < 3e-5


@needs_native
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("olmo", {"clip_qkv": 3.0}, "its attention is its own in 2 of 2 layers"),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 64,
            },
            "its angles are longrope: other ones once a text is long",
        ),
    ],
    ids=["a limit that few tokens meet", "angles that move"],
)
def test_what_a_few_tokens_do_not_show_is_found_all_the_same(kind, changes, reason):
    """Without larger inputs, and positions that are far, each would run in one call and be wrong on other texts."""
    assert errors_in_one_call(families.make_family(kind, **changes)) == f"layer by layer: {reason}"


def read(kind, **changes):
    model = families.make_family(kind, **changes)
    assert errors_in_one_call(model) < 3e-5
    return decoder_of(model)


@needs_native
def test_places_of_norms_and_sums_are_read_off_what_was_seen():
    places = ("attention_norm", "attended_norm", "mlp_norm", "projected_norm")
    expected = {
        "llama": ((1, 0, 1, 0), Order.SEQUENTIAL),
        "olmo2": ((0, 1, 0, 1), Order.SEQUENTIAL),
        "glm4": ((1, 1, 1, 1), Order.SEQUENTIAL),
        "cohere2": ((1, 0, 1, 0), Order.PARALLEL),
        "phi": ((1, 0, 1, 0), Order.PARALLEL_FIRST),
    }
    for kind, (norms, order) in expected.items():
        layer = read(kind).structure.layers[0]
        assert tuple(bool(getattr(layer, name).weight) for name in places) == norms, kind
        assert layer.order == order, kind


@needs_native
def test_ways_of_turning_are_read_off_what_was_handed_to_attention():
    assert How(read("olmo2").structure.layers[0].how) == How.NORMS_WHOLE
    assert How(read("hunyuan_v1_dense").structure.layers[0].how) == How.NORMS_AFTER
    assert How(read("cohere").structure.layers[0].how) == How.PAIRS
    layers = read("smollm3", no_rope_layers=[1, 0]).structure.layers
    assert (layers[0].angles, layers[1].angles) == (0, -1)
    found = read("gemma3_text", layer_types=MIXED, sliding_window=6)
    assert [found.structure.layers[i].angles for i in range(2)] == [0, 1]
    assert len(found.angles) == 2


@needs_native
def test_scales_of_queries_are_those_of_far_positions_though_no_token_of_the_trial_has_one():
    (angles,) = read("ministral3", rope_parameters=MINISTRAL).angles
    positions = torch.tensor([0, 16383, 16384, 40000, 262143])
    expected = 1 + 0.1 * torch.log(1 + torch.floor(positions / 16384))
    assert expected[0] == expected[1] < expected[2]
    assert torch.equal(angles.scales(positions), expected)
    assert read("llama").angles[0].scales is None


@needs_native
def test_multipliers_are_those_of_the_configuration():
    found = read("granite", embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0)
    assert found.structure.embedding_scale == 12.0
    assert (found.structure.layers[0].attended_scale, found.structure.layers[0].projected_scale) == (0.22, 0.22)
    assert found.ending in (Ending(divisor=8.0), Ending(factor=0.125))


@needs_native
def test_a_multiplier_is_a_number_that_gives_the_same_bits_or_is_solved_for():
    x = torch.randn(40, generator=torch.Generator().manual_seed(3))
    assert scale_between(x, x, ()) == 1.0
    assert scale_between(x, x * 0.22, (0.22, 12.0)) == 0.22
    assert scale_between(x, x / 16, (16.0,)) == 1 / 16
    assert scale_between(x, x * 0.3137, ()) == pytest.approx(0.3137, rel=1e-5)
    assert scale_between(x, x + 1, ()) is None


@needs_native
def test_an_ending_that_is_not_known_is_refused():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    assert read_ending(x, x, ()) == Ending()
    assert read_ending(x, (x / 5).tanh() * 5, (2.0, 5.0)) == Ending(softcap=5.0)
    with pytest.raises(OtherwiseError, match="its logits are not those"):
        read_ending(x, x.square(), (2.0,))
