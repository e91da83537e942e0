from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP

from support.backends import tiny_models
from trencadis_torch.parallel.fused import gates_side_by_side, heads_side_by_side


def attention(kind=Phi3Attention):
    with torch.device("meta"):
        return kind(tiny_models._config("phi3"), 0)


def test_an_attention_with_queries_keys_values_in_this_order_is_known_by_a_trial():
    assert heads_side_by_side(attention(), num_heads=4, num_kv_heads=2, fused="qkv_proj", out="o_proj")


class _After(nn.Module):
    """Another module, and a change to its input or output."""

    def __init__(self, inner, *, before=None, after=None):
        super().__init__()
        self._inner = (inner,)
        self._before = before or (lambda x: x)
        self._after = after or (lambda x: x)

    def forward(self, x):
        return self._after(self._inner[0](self._before(x)))


class KeysFirst(Phi3Attention):
    def forward(self, *args, **options):
        self._modules["qkv_proj"] = _After(self.qkv_proj, after=lambda x: x.roll(24, -1))
        return super().forward(*args, **options)


class Backwards(Phi3Attention):
    def forward(self, *args, **options):
        self._modules["o_proj"] = _After(self.o_proj, before=lambda x: x.flip(-1))
        return super().forward(*args, **options)


class TakesMore(Phi3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, offsets, **options):
        return super().forward(hidden_states, position_embeddings, attention_mask, **options)


@pytest.mark.parametrize("kind", [KeysFirst, Backwards, TakesMore])
def test_any_other_attention_is_not(kind):
    assert not heads_side_by_side(attention(kind), num_heads=4, num_kv_heads=2, fused="qkv_proj", out="o_proj")
    assert not heads_side_by_side(attention(), num_heads=2, num_kv_heads=4, fused="qkv_proj", out="o_proj")


def mlp(kind=Phi3MLP):
    with torch.device("meta"):
        return kind(tiny_models._config("phi3"))


class Interleaved(Phi3MLP):
    def forward(self, hidden_states):
        whole = self.gate_up_proj(hidden_states)
        return self.down_proj(whole[..., 1::2] * self.activation_fn(whole[..., ::2]))


class Normed(Phi3MLP):
    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        inner = up * self.activation_fn(gate)
        return self.down_proj(inner / inner.norm(dim=-1, keepdim=True))


def test_gates_beside_what_they_gate_are_known_by_a_trial():
    assert gates_side_by_side(mlp(), fused="gate_up_proj", out="down_proj")


@pytest.mark.parametrize("kind", [Interleaved, Normed])
def test_any_other_mlp_is_not(kind):
    assert not gates_side_by_side(mlp(kind), fused="gate_up_proj", out="down_proj")
