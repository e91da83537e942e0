"""Whole modules against those of transformers, on what goes through a model; what builds them is in test_surgery.py."""

from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from trencadis_torch.attention import adapter
from trencadis_torch.linear.fused import FusedNorm, GatedMLP, RotaryAttention
from trencadis_torch.linear.native import ACTIVATIONS, native
from trencadis_torch.linear.replacement import replace_modules

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


@torch.no_grad()
def test_norm_has_its_weight_as_a_parameter_that_tells_dtype_and_device():
    norm = FusedNorm(torch.full((6,), 2.0), 1e-6, native())
    (weight,) = norm.parameters()
    assert (weight.dtype, weight.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(norm(torch.full((1, 2, 6), 3.0)), torch.full((1, 2, 6), 2.0))


@torch.no_grad()
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_mlp_is_that_of_the_definition(name):
    gate, up, down = (torch.nn.Linear(*size, bias=False) for size in ((8, 20), (8, 20), (20, 8)))
    x = torch.randn(1, 5, 8)
    activation = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": torch.nn.GELU("tanh")}[name]
    mlp = GatedMLP(lambda x: torch.cat([gate(x), up(x)], -1), down, ACTIVATIONS[name], native())
    torch.testing.assert_close(mlp(x), down(activation(gate(x)) * up(x)), atol=1e-6, rtol=1e-5)


class Recorder:
    """Attends with one more than each value, and keeps what it was handed."""

    def __init__(self):
        self.calls = []

    def attend(self, layer_index, query, keys, values, *, options):
        self.calls.append((layer_index, query.clone(), keys.clone(), values.clone(), options))
        return values.repeat_interleave(query.shape[1] // values.shape[1], 1) + 1


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral"])
def test_attention_hands_on_what_the_original_hands_on(kind):
    adapter.register()
    tokens, positions = torch.tensor([[5, 9, 77, 3]]), torch.tensor([[0, 1, 30, 7]])
    found = []
    for replaced in (False, True):
        model = tiny_models.make_model(kind)
        if replaced:
            replace_modules(model, native=native())
            assert sum(isinstance(part, RotaryAttention) for part in model.modules()) == 3
        adapter.switch(model, adapter.PAGED)
        recorder = Recorder()
        model(input_ids=tokens, position_ids=positions, use_cache=False, **{adapter.PASS_ARGUMENT: recorder})
        found.append(recorder.calls)
    for plain, fused in zip(*found, strict=True):
        assert (plain[0], plain[4:]) == (fused[0], fused[4:])
        for expected, result in zip(plain[1:4], fused[1:4], strict=True):
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
