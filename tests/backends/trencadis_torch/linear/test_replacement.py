from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from support.backends import tiny_models
from trencadis.errors import ModelLoadError
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.linear.decoder import decoder_of, how_it_runs
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.native import native
from trencadis_torch.linear.packed import FusedLinear, PackedLinear, RowsEmbedding
from trencadis_torch.linear.replacement import fuse_decoder, replace_modules
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
