from __future__ import annotations

import logging
from importlib import import_module

import pytest
import torch

from support.backends import tiny_models
from trencadis_gaudi.fused.meanings import rotary_blockwise, rotary_pairwise
from trencadis_gaudi.fused.rotary import RotaryKind, fuse_rotary, kind_of

CPU = torch.device("cpu")
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


def inputs(rotated, dtype):
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
        for found, expected in zip(fused(*inputs(size, dtype)), original(*inputs(size, dtype)), strict=True):
            assert torch.equal(found, expected)


def test_kernel_gets_tokens_first_and_tables_as_wide_as_what_is_rotated():
    seen = []

    def kernel(x, cos, sin):
        seen.append((x.shape, cos.shape, sin.shape))
        return rotary_blockwise(x, cos, sin)

    kind_of(function_of("gpt_neox")).function(kernel, function_of("gpt_neox"))(*inputs(4, torch.float32))
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
    q, k, cos, sin = inputs(16, torch.float32)
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
