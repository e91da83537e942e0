from __future__ import annotations

import logging
from importlib import import_module

import pytest
import torch
from torch import nn

from support.backends import tiny_models
from trencadis_gaudi.fused.meanings import rms_norm, rotary_blockwise, rotary_pairwise
from trencadis_gaudi.fused.norm import FusedNorm, fuse_norms
from trencadis_gaudi.fused.rotary import RotaryKind, fuse_rotary, kind_of

CPU = torch.device("cpu")
SERVED = [
    ("apertus", "ApertusRMSNorm", False),
    ("gemma", "GemmaRMSNorm", True),
    ("gemma2", "Gemma2RMSNorm", True),
    ("gemma3", "Gemma3RMSNorm", True),
    ("glm4", "Glm4RMSNorm", False),
    ("gpt_oss", "GptOssRMSNorm", False),
    ("helium", "HeliumRMSNorm", False),
    ("llama", "LlamaRMSNorm", False),
    ("mistral", "MistralRMSNorm", False),
    ("olmo2", "Olmo2RMSNorm", False),
    ("qwen3", "Qwen3RMSNorm", False),
    ("qwen3_next", "Qwen3NextRMSNorm", True),
]
OTHERS = [
    ("cohere2", "Cohere2LayerNorm"),
    ("nemotron", "NemotronLayerNorm1P"),
    ("olmo", "OlmoLayerNorm"),
    ("qwen3_next", "Qwen3NextRMSNormGated"),
]


class Model(nn.Module):
    """Two places of one norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.same = norm
        self.dtype = next((one.dtype for one in norm.parameters()), torch.float32)


def norm_of(family, name, size=24):
    norm = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(size)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(size, generator=torch.Generator().manual_seed(3)))
    return norm


def inputs(dtype=torch.float32):
    return torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(5)).to(dtype) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "name", "adds_one"), SERVED)
@torch.no_grad()
def test_norm_runs_in_the_kernel_and_computes_the_same(family, name, adds_one, dtype):
    model, x = Model(norm_of(family, name).to(dtype)), inputs(dtype)
    expected, calls = model.norm(x), []

    def kernel(*args):
        calls.append(args)
        return rms_norm(*args)

    assert fuse_norms(model, kernel, CPU) == {name: 1}
    assert model.norm is model.same
    calls.clear()
    found = model.norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    ((_, gamma, _),) = calls
    assert gamma.dtype == (torch.float32 if adds_one else dtype)


@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_norm_of_another_meaning_stays(family, name):
    model = Model(norm_of(family, name))

    def never(*_):
        raise AssertionError("there is no norm for it")

    assert not fuse_norms(model, never, CPU)
    assert type(model.norm).__name__ == name


class Twisted(nn.Module):
    """A norm that looks like Llama's."""

    def __init__(self, twist):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.variance_epsilon = 1e-6
        self.twist = twist

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        if self.twist == "epsilon":
            return self.weight * x / (variance.sqrt() + self.variance_epsilon)
        if self.twist == "mean":
            x = x - x.mean(-1, keepdim=True)
        if self.twist == "scale":
            return 1.001 * self.weight * x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize(("twist", "served"), [("none", 1), ("epsilon", 0), ("mean", 0), ("scale", 0)])
def test_norm_is_recognised_by_its_numbers_and_not_by_its_name(twist, served):
    assert fuse_norms(Model(Twisted(twist)), rms_norm, CPU).total() == served


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda x, gamma, eps: rms_norm(x, gamma, 0.0), "it does not compute its published meaning"),
        (lambda x, gamma, eps: rms_norm(x, gamma + 1, eps), "it does not compute its published meaning"),
        (lambda x, gamma, eps: rms_norm(x, gamma, eps).double(), "it does not compute its published meaning"),
        (lambda x, gamma: x, "a trial of it ends with TypeError"),
    ],
)
def test_kernel_that_is_wrong_is_not_used_and_said_once(fault, why, caplog):
    model = tiny_models.make_model("llama")
    with caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        assert not fuse_norms(model, fault, CPU)
    assert not any(isinstance(part, FusedNorm) for part in model.modules())
    assert len(caplog.messages) == 1
    assert f"HPU FusedRMSNorm kernel is not used: {why}" in caplog.text
    assert "Norms use plain operations." in caplog.text


RIGHT = {"BLOCKWISE": rotary_blockwise, "PAIRWISE": rotary_pairwise}
KINDS = {
    "cohere2": RotaryKind("PAIRWISE", "whole", "wide"),
    "ernie4_5": RotaryKind("PAIRWISE", "repeated", "wide"),
    "gemma3": RotaryKind("BLOCKWISE", "whole", "given"),
    "glm4": RotaryKind("PAIRWISE", "repeated", "given"),
    "gpt_neox": RotaryKind("BLOCKWISE", "whole", "given"),
    "gpt_oss": RotaryKind("BLOCKWISE", "half", "given"),
    "helium": RotaryKind("PAIRWISE", "repeated", "given"),
    "llama": RotaryKind("BLOCKWISE", "whole", "given"),
    "olmo2": RotaryKind("BLOCKWISE", "whole", "restored"),
    "phi3": RotaryKind("BLOCKWISE", "whole", "given"),
}


def function_of(family):
    return import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb


def rotary_inputs(rotated, dtype):
    generator = torch.Generator().manual_seed(2)
    shapes = ((1, 4, 6, 16), (1, 2, 6, 16), (1, 6, rotated), (1, 6, rotated))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(KINDS))
def test_kernel_with_its_preparation_computes_what_transformers_function_does(family, dtype):
    """Scaled tables, too: they are no cosines here."""
    original = function_of(family)
    kind = kind_of(original)
    assert kind == KINDS[family]
    fused = kind.function(RIGHT[kind.mode], original)
    for size in {"gpt_oss": (8,), "gpt_neox": (16, 4), "phi3": (16, 12), "glm4": (16, 8)}.get(family, (16,)):
        for found, expected in zip(
            fused(*rotary_inputs(size, dtype)), original(*rotary_inputs(size, dtype)), strict=True
        ):
            assert torch.equal(found, expected)


def test_kernel_gets_tokens_first_and_tables_as_wide_as_what_is_rotated():
    seen = []

    def kernel(x, cos, sin):
        seen.append((x.shape, cos.shape, sin.shape))
        return rotary_blockwise(x, cos, sin)

    kind_of(function_of("gpt_neox")).function(kernel, function_of("gpt_neox"))(*rotary_inputs(4, torch.float32))
    assert seen == [((6, 1, heads, 4), (6, 1, 1, 4), (6, 1, 1, 4)) for heads in (4, 2)]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, cos, sin: (q * cos.unsqueeze(1), k * cos.unsqueeze(1)),
        lambda q, k, cos, sin: (q, rotary_blockwise(k, cos.unsqueeze(1), sin.unsqueeze(1))),
        lambda q, k, cos, sin: tuple(rotary_blockwise(x, cos.unsqueeze(1), -sin.unsqueeze(1)) for x in (q, k)),
        lambda x, sin, cos: x,
        import_module("transformers.models.gptj.modeling_gptj").apply_rotary_pos_emb,
    ],
)
def test_other_functions_have_no_kind(function):
    assert kind_of(function) is None


def test_heads_in_another_place_are_left_to_transformers_function():
    original = function_of("llama")
    q, k, cos, sin = rotary_inputs(16, torch.float32)
    fused = kind_of(original).function(None, original)
    found = fused(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
    for one, other in zip(found, original(q, k, cos, sin), strict=True):
        assert torch.equal(one, other.transpose(1, 2))


def test_modules_of_one_model_get_the_function_and_those_of_another_keep_theirs():
    model, other = tiny_models.make_model("llama"), tiny_models.make_model("llama")
    tokens, calls = torch.tensor([tiny_models.prompt(9)]), []

    def kernel(*args):
        calls.append(args)
        return rotary_blockwise(*args)

    assert fuse_rotary(model, {**RIGHT, "BLOCKWISE": kernel}, CPU) == {("LlamaAttention", "BLOCKWISE"): 3}
    classes = {type(layer.self_attn) for layer in model.model.layers}
    assert len(classes) == 1, "torch.compile would make a graph for each"
    assert isinstance(model.model.layers[0].self_attn, type(other.model.layers[0].self_attn))
    calls.clear()
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, other(tokens).logits, rtol=0, atol=0)
    assert len(calls) == 6, "queries and keys of three layers"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (rotary_pairwise, "it does not compute its published meaning"),
        (lambda x, cos, sin: rotary_blockwise(x, sin, cos), "it does not compute its published meaning"),
        (lambda x, cos: x, "a trial of it ends with TypeError"),
    ],
    ids=["mode", "tables", "signature"],
)
def test_kernel_that_is_wrong_in_a_mode_is_not_used_and_said_once(fault, why, caplog):
    model = tiny_models.make_model("llama")
    with caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        assert not fuse_rotary(model, {**RIGHT, "BLOCKWISE": fault}, CPU)
    assert len(caplog.messages) == 1
    assert f"HPU apply_rotary_pos_emb kernel is not used: in the mode BLOCKWISE {why}" in caplog.text


def test_kernel_of_the_other_mode_does_not_matter():
    faulty = {"BLOCKWISE": rotary_blockwise, "PAIRWISE": rotary_blockwise}
    assert fuse_rotary(tiny_models.make_model("llama"), faulty, CPU).total() == 3
