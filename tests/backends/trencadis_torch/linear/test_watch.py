from __future__ import annotations

import pytest
import torch
from torch import nn

from support.backends import tiny_models
from trencadis_torch.attention import adapter
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
