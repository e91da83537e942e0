from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from trencadis.errors import ModelLoadError
from trencadis_torch.attention import adapter
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.self_check import ModelCheck, check_model


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_model_passes_and_is_left_with_paged_attention(layout, dtype):
    model = tiny_models.make_model("gemma2", dtype=dtype)
    check_model(model, attention_layers(model), layout=layout)
    assert model.config._attn_implementation == adapter.PAGED


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_every_pass_runs_once(layout):
    model = tiny_models.make_model("llama")
    layers = attention_layers(model)
    check = ModelCheck(model, layers, layout=layout)
    num_tokens = []
    model.register_forward_pre_hook(
        lambda module, args, options: num_tokens.append(options["input_ids"].numel()), with_kwargs=True
    )
    check.compare(model)
    # A chunk of one sequence, the rest of it with the other one, a token of each; padded ones are as long as the longest.
    assert num_tokens == ([12, 13 + 12, 2] if layout == "ragged" else [12, 2 * 13, 2])


def refused(model, layers=None, *, match="differ from the model's own"):
    layers = layers or attention_layers(model)
    for layout in ("ragged", "padded"):
        with pytest.raises(ModelLoadError, match=match):
            check_model(model, layers, layout=layout)


def test_state_that_crosses_tokens_outside_attention_is_noticed():
    model = tiny_models.make_model("llama")

    def shift(module, inputs, output):
        return output + 0.5 * output.roll(1, dims=1)

    model.model.layers[1].mlp.register_forward_hook(shift)
    refused(model)


def test_window_that_was_missed_is_noticed():
    model = tiny_models.make_model("mistral")
    windowless = tuple(
        type(layer)(**{name: getattr(layer, name) for name in layer.__slots__ if name != "__weakref__"} | {"window": 0})
        for layer in attention_layers(model)
    )
    refused(model, windowless)


def test_logits_that_are_no_numbers_are_noticed():
    model = tiny_models.make_model("llama")
    layers = attention_layers(model)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    refused(model, layers)
