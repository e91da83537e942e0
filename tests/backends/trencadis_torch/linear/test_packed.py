from __future__ import annotations

import pytest
import torch
from torch import nn

from trencadis_torch.linear import packed as linear
from trencadis_torch.linear.native import native
from trencadis_torch.linear.packed import BlockedLinear, Int8Linear, PackedLinear, RowsEmbedding, quantise

needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")
KINDS = [
    pytest.param(lambda layers: PackedLinear(layers, native()), 1e-5, id="packed", marks=needs_native),
    pytest.param(lambda layers: Int8Linear(layers, native()), 0.02, id="int8", marks=needs_native),
    pytest.param(BlockedLinear, 1e-5, id="blocked"),
]


def layers(*, biases=(True, False, True)):
    torch.manual_seed(0)
    return [nn.Linear(96, size, bias=bias) for size, bias in zip((70, 33, 128), biases, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize(("make", "allowed"), KINDS)
@pytest.mark.parametrize("biases", [(True, False, True), (False, False, False)])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 9, 96), (40, 96)])
def test_layers_side_by_side_give_what_they_gave_apart(make, allowed, biases, shape):
    parts = layers(biases=biases)
    x = torch.randn(shape)
    expected = torch.cat([part(x) for part in parts], -1)
    fused = make(parts)
    found = fused(x)
    assert found.shape == expected.shape == (*shape[:-1], fused.out_features)
    assert float((found - expected).norm() / expected.norm()) < allowed


@pytest.mark.parametrize(("make", "allowed"), KINDS)
def test_a_layer_holds_no_other_weights(make, allowed):
    fused = make(layers())
    plain = sum(part.weight.nbytes for part in layers())
    assert not list(fused.parameters())
    assert fused.weights_bytes >= plain * (1 if allowed < 0.01 else 0.25)
    assert fused.weights_bytes < plain * (1.2 if allowed < 0.01 else 0.35)


def test_weights_are_rounded_to_the_nearest_of_255_values_per_output():
    weight = torch.randn(30, 50)
    weight[7] = 0
    rounded, scales = quantise(weight)
    assert rounded.dtype is torch.int8
    assert rounded.abs().amax(1).tolist() == [0 if row == 7 else 127 for row in range(30)]
    error = (rounded * scales[:, None] - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())
    assert not rounded[7].any()


@pytest.mark.parametrize("at_once", [1, 100, 1 << 18])
def test_rounding_a_few_rows_at_a_time_changes_nothing(monkeypatch, at_once):
    weight = torch.randn(31, 50).double()
    weight[7] = 0
    plain = weight.float()
    scales = plain.abs().amax(1) / 127
    expected = (plain / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    monkeypatch.setattr(linear, "AT_ONCE", at_once)
    rounded, found = quantise(weight)
    assert torch.equal(rounded, expected)
    assert torch.equal(found, scales)


@needs_native
@torch.no_grad()
def test_embeddings_are_the_rows_of_the_projection_they_share():
    head = nn.Linear(48, 131, bias=False)
    ids = torch.tensor([[0, 130, 77]])
    assert torch.equal(RowsEmbedding(PackedLinear([head], native()), 3.0)(ids), head.weight[ids] * 3.0)
    rounded, scales = quantise(head.weight)
    expected = (rounded * scales[:, None])[ids]
    assert torch.equal(RowsEmbedding(Int8Linear([head], native()), 1.0)(ids), expected)


@needs_native
def test_embeddings_do_not_count_the_projection_as_a_part_of_theirs():
    assert [*RowsEmbedding(PackedLinear([nn.Linear(4, 4)], native()), 1.0).modules()][1:] == []
