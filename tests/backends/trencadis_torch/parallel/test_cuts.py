from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP

from support.backends import tiny_models
from trencadis.errors import ModelLoadError
from trencadis_torch.parallel.cuts import even, padded
from trencadis_torch.parallel.fused import gates_side_by_side, heads_side_by_side
from trencadis_torch.parallel.heads import Heads


def test_sizes_that_leave_a_rest_are_refused_with_the_legal_ones():
    with pytest.raises(ModelLoadError, match=r"tensor = 5: mlp.gate has 12 .* not a multiple of 5") as found:
        even(12, dim=0, rank=0, size=5, what="mlp.gate")
    assert "1, 2, 3, 4, 6, 12" in found.value.hint


@pytest.mark.parametrize(("num", "size"), [(131, 2), (131, 4), (5, 4), (3, 4), (8, 4)])
def test_vocabularies_are_divided_without_a_gap_and_padded_at_the_end(num, size):
    cuts = [padded(num, dim=0, rank=rank, size=size) for rank in range(size)]
    assert [token for cut in cuts for one in cut.ranges for token in range(*one)] == list(range(num))
    assert len({cut.size for cut in cuts}) == 1
    assert all(last - first <= cut.size for cut in cuts for first, last in cut.ranges)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 2, 8), (4, 1, 4), (6, 2, 2)]
)
def test_every_query_head_finds_its_kv_head_on_its_rank(num_heads, num_kv_heads, size):
    groups = num_heads // num_kv_heads
    seen = []
    for rank in range(size):
        heads = Heads.of(num_heads, num_kv_heads, rank=rank, size=size, what="m")
        local_groups = heads.num_query // heads.num_kv
        for own in range(heads.num_query):
            assert heads.first_kv + own // local_groups == (heads.first_query + own) // groups
            seen.append(heads.first_query + own)
    assert seen == list(range(num_heads))


def test_ranks_beyond_the_kv_heads_have_them_several_times():
    found = [Heads.of(8, 2, rank=rank, size=4, what="m") for rank in range(4)]
    assert [(one.first_kv, one.num_kv) for one in found] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("size", "legal"), [(3, "1, 2, 4, 12"), (24, "1, 2, 4, 12")])
def test_other_numbers_of_ranks_are_refused_with_the_legal_ones(size, legal):
    with pytest.raises(ModelLoadError, match="12 query heads and 4 KV heads") as found:
        Heads.of(12, 4, rank=0, size=size, what="m")
    assert found.value.hint.endswith(f"one of: {legal}.")


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
