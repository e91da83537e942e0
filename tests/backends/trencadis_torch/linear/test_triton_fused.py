"""Norms, gates and rotations in Triton: in its interpreter on the CPU, compiled on a CUDA device."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from support.backends import tiny_models
from support.devices import DEVICE, ON_CUDA
from trencadis_torch.attention import adapter
from trencadis_torch.attention import triton_kernels as attention_kernels
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.heads import Heads
from trencadis_torch.linear.native import ACTIVATIONS
from trencadis_torch.linear.replacement import fuse_modules
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.self_check import paged_logits

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_CUDA else [])]
"""The interpreter's numpy has no bfloat16."""


@pytest.fixture
def kernels():
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
    if not ON_CUDA and not attention_kernels.is_interpreted():
        pytest.skip("TRITON_INTERPRET is 0: kernels are compiled for a GPU")
    from trencadis_torch.linear.triton_kernels import TritonModules

    return TritonModules()


def drawn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(found, expected, dtype):
    """Rounded once."""
    error = (found.double() - expected).abs()
    allowed = torch.finfo(dtype).eps * expected.abs() + 2e-6
    assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 48, 1000])
def test_norm_is_that_of_its_formula(kernels, size, dtype):
    x, weight = drawn(1, 5, size, dtype=dtype), drawn(size, dtype=dtype, seed=1)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    found = kernels.rms_norm(x, weight, 1e-3)
    assert found.dtype is dtype
    near(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [7, 1030])
def test_gate_is_that_of_its_formula(kernels, size, activation, dtype):
    x = drawn(3, 2 * size, dtype=dtype) * 4
    gates, values = x.double().chunk(2, -1)
    active = {
        "silu": lambda x: x * x.sigmoid(),
        "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
        "gelu": lambda x: 0.5 * x * (1 + (x / math.sqrt(2)).erf()),
        "relu2": lambda x: x.relu() ** 2,
        "relu": torch.relu,
    }[activation](gates)
    near(kernels.gate(x, ACTIVATIONS[activation]), active * values, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(12, 12), (64, 64), (20, 8)])
def test_heads_are_normed_and_turned_and_values_left_alone(kernels, head_dim, rotated, has_norms, dtype):
    heads, kv_heads, tokens = 3, 2, 4
    x = drawn(1, tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(1, tokens, rotated // 2, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 6
    cosines, sines = (one.repeat(1, 1, 2).to(dtype) for one in (angles.cos(), angles.sin()))
    norms = tuple(drawn(head_dim, dtype=dtype, seed=seed) for seed in (3, 4)) if has_norms else (None, None)
    parts = x.double().unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=-2)
    expected = []
    for part, norm in zip(parts[:2], norms, strict=True):
        if norm is not None:
            part = part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()  # noqa: PLW2901
        turned, rest = part[..., :rotated], part[..., rotated:]
        left, right = turned.chunk(2, -1)
        halves = torch.cat([-right, left], -1)
        turned = turned * cosines.double()[..., None, :] + halves * sines.double()[..., None, :]
        expected.append(torch.cat([turned, rest], -1))
    whole = torch.cat([*expected, parts[2]], dim=-2).flatten(-2)
    sizes = Heads(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, query_norm=norms[0], key_norm=norms[1], eps=1e-5
    )
    kernels.rotate(x, sizes, (cosines, sines))
    near(x, whole, dtype)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "mixtral", "phi3", "gpt2"])
@torch.inference_mode()
def test_fused_models_give_the_logits_of_transformers(kernels, kind):
    model = tiny_models.make_model(kind).to(DEVICE)
    adapter.register()
    layers, fused = attention_layers(model), copy.deepcopy(model)
    found = fuse_modules(fused, kernels=kernels)
    tokens, logits = [torch.tensor(tiny_models.prompt(count)) for count in (11, 6)], []
    for one in (model, fused):
        adapter.switch(one, adapter.PAGED)
        logits.append(torch.cat(paged_logits(one, layers, tokens, "ragged")))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4 * float(logits[0].abs().max()), rtol=0)
    kinds = {type(part) for part in fused.modules()}
    is_plain = kind not in ("mixtral", "gpt2")
    assert ({FusedNorm, FusedMLP, RotaryAttention} <= kinds) == is_plain
    assert found.num_fused > 0
    assert found.weights_bytes == sum({one.data_ptr(): one.nbytes for one in fused.parameters()}.values())


def test_a_module_that_computes_something_else_stays(kernels):
    model = tiny_models.make_model("llama").to(DEVICE)
    strange = model.model.layers[1].mlp
    strange.register_forward_hook(lambda _, __, output: output + 1)
    fuse_modules(model, kernels=kernels)
    assert model.model.layers[1].mlp is strange
    assert isinstance(model.model.layers[0].mlp, FusedMLP)
