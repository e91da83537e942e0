from __future__ import annotations

import pytest
import torch
from torch import nn

from support.backends import tiny_models
from support.backends.decoder_scene import CPU, Scene, fused_model
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.linear.angles import Angles, Frequencies, ModuleAngles, simplified
from trencadis_torch.linear.decoder import attach, decoder_of, read_decoder
from trencadis_torch.linear.native import native
from trencadis_torch.linear.native_decoder import native_decoder
from trencadis_torch.linear.replacement import replace_modules
from trencadis_torch.linear.structure import OtherwiseError
from trencadis_torch.loading.inspection import attention_layers

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


def replaced(kind, **settings):
    adapter.register()
    model = tiny_models.make_model(kind)
    for name, value in settings.items():
        setattr(model.config, name, value)
    replace_modules(model, native=native())
    return model


def read(model):
    return read_decoder(model, native_decoder(), panel=native().panel)


def test_sizes_are_the_models():
    model = replaced("qwen3")
    found, config = read(model), model.config
    assert (found.vocab_size, found.intermediate_size) == (config.vocab_size, config.intermediate_size)
    assert found.structure.num_layers == config.num_hidden_layers == len(found.attention)
    assert [one.index for one in found.attention] == list(range(config.num_hidden_layers))
    one = found.attention[0]
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert (one.num_heads, one.num_kv_heads, one.head_dim) == heads
    assert one.options.scale == pytest.approx(config.head_dim**-0.5)


def scaled_logits(model):
    plain = model.forward

    def forward(**options):
        made = plain(**options)
        made.logits = made.logits * torch.arange(131.0)
        return made

    model.forward = forward


def scaled(module, factor):
    """What a module gives is multiplied in its layer."""
    module.register_forward_hook(
        lambda _, __, made: (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "its attention is its own in 3 of 3 layers"),
    ],
)
def test_a_decoder_that_is_not_plain_is_left_with_the_reason(kind, reason):
    with pytest.raises(OtherwiseError) as caught:
        read(replaced(kind))
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: setattr(model.model.layers[1], "mlp", nn.Identity()),
            "a layer has not one attention and one MLP",
        ),
        (lambda model: model.model.layers[1].register_forward_hook(lambda _, __, y: y + 1), "something else is added"),
        (
            lambda model: model.model.layers[1].register_forward_pre_hook(lambda _, x: (x[0] + 1,)),
            "something happens between its layers",
        ),
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "its angles are dynamic"),
        (lambda model: setattr(model, "lm_head", nn.Linear(48, 131)), "its output projection is not packed"),
        (lambda model: model.model.layers[0].self_attn.options.update(dropout=1), "its attention takes"),
        (lambda model: model.model.layers[0].self_attn.options.update(more=1), "its attention takes"),
        (lambda model: setattr(model.model, "norm", nn.Identity()), "its last norm is its own"),
        (lambda model: scaled(model.model.embed_tokens, torch.arange(48.0)), "its embeddings are not"),
        (lambda model: scaled_logits(model), "its logits are not those"),
    ],
)
def test_a_model_that_differs_in_one_place_is_left_with_the_reason(change, reason):
    model = replaced("llama")
    assert read(model).structure.num_layers == 3
    change(model)
    with pytest.raises(OtherwiseError, match=reason):
        read(model)


def test_weights_are_held_once():
    model, _ = fused_model("llama", "float32")
    decoder = decoder_of(model)
    first = model.model.layers[0]
    assert decoder.structure.layers[0].qkv.weights == first.self_attn.qkv.packed.weights.data_ptr()
    assert decoder.structure.layers[0].attention_norm.weight == first.input_layernorm.weight.data_ptr()


def test_shared_embeddings_are_read_out_of_the_output_projection():
    adapter.register()
    model = tiny_models.make_model("llama")
    model.config.tie_word_embeddings = True
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    replace_modules(model, native=native())
    found = read(model)
    assert found.structure.embeddings is None
    assert found.structure.num_embeddings == 131


@pytest.mark.parametrize("as_it_is", [False, True])
def test_angles_are_those_of_the_models_own_module_however_far_they_were_computed_at_once(as_it_is):
    rotary = tiny_models.make_model("llama").model.rotary_emb
    source = ModuleAngles(rotary, (), spread=False, once=False)
    angles = Angles(source if as_it_is else simplified(source, 512))
    assert isinstance(angles.source, ModuleAngles if as_it_is else Frequencies)
    for reach in (3, 256, 257, 700):
        angles.reach(reach)
        assert len(angles.cosines) >= reach
        expected = rotary(torch.empty(1, 1, 1), torch.arange(reach)[None])
        assert torch.equal(angles.cosines[:reach], expected[0][0])
        assert torch.equal(angles.sines[:reach], expected[1][0])


def test_angles_that_are_no_multiples_of_the_position_stay_their_modules_own():
    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

        def forward(self, x, positions):
            turns = positions[..., None].float().clamp(max=900) * self.frequencies
            both = torch.cat([turns, turns], -1)
            return both.cos(), both.sin()

    source = ModuleAngles(Bent(), (), spread=False, once=False)
    assert simplified(source, 4096) is source
    assert isinstance(simplified(source, 800), Frequencies)


def test_a_model_goes_layer_by_layer_again_when_nothing_is_attached():
    model, layers = fused_model("llama", "float32")
    decoder = decoder_of(model)
    try:
        attach(model, None)
        assert decoder_of(model) is None
        assert Scene("llama").runner._decoder is None
    finally:
        attach(model, decoder)
    assert Scene("llama").runner._decoder is not None
    assert choose_kernel("native", device=CPU, layout="ragged", layers=layers) is not None


def test_what_nothing_was_attached_to_has_no_decoder():
    model = tiny_models.make_model("gpt2")
    assert decoder_of(model) is None
    assert len(attention_layers(model)) == 3
