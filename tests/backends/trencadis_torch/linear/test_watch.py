"""Whole modules against those of transformers, on what goes through a model; what builds them is in test_surgery.py."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from support.backends import tiny_models
from trencadis.errors import BackendError
from trencadis_torch.attention import adapter
from trencadis_torch.linear.native import KINDS, Product, native
from trencadis_torch.linear.native_decoder import (
    PARTS,
    Decoder,
    Layer,
    NativeDecoder,
    layer_array,
    native_decoder,
)
from trencadis_torch.linear.watch import watch


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


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


needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


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
