from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

from support.backends.held_forms import FORMS
from trencadis_torch.linear import packed as linear
from trencadis_torch.linear.held import ChannelWeight, FloatWeight, GroupedWeight
from trencadis_torch.linear.native import native
from trencadis_torch.linear.packed import RowsEmbedding, held_of, pack, quantise, quantise_groups

needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


def packed(layers, quantization="none", *, library=True):
    weights = [held_of(layer, quantization) for layer in layers]
    return pack(weights, [layer.bias for layer in layers], native() if library else None)


KINDS = [
    pytest.param(packed, 1e-5, id="packed", marks=needs_native),
    pytest.param(lambda layers: packed(layers, "int8"), 0.02, id="int8", marks=needs_native),
    pytest.param(lambda layers: packed(layers, "int4"), 0.12, id="int4", marks=needs_native),
    pytest.param(lambda layers: packed(layers, library=False), 1e-5, id="blocked"),
]
SIZES = {1e-5: (1.0, 1.2), 0.02: (0.25, 0.35), 0.12: (0.14, 0.22)}
"""Memory of the weights by that in float32, at least and at most, by the error that is allowed."""


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
    least, most = SIZES[allowed]
    assert plain * least <= fused.weights_bytes < plain * most


def test_weights_are_rounded_to_the_nearest_of_255_values_per_output():
    weight = torch.randn(30, 50)
    weight[7] = 0
    held = quantise(weight)
    rounded, scales = held.values, held.scales
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
    found = quantise(weight)
    assert torch.equal(found.values, expected)
    assert torch.equal(found.scales, scales)
    parts = [quantise_groups(weight[i : i + 1, :32], 16) for i in range(31)]
    whole = quantise_groups(weight[:, :32], 16)
    assert torch.equal(whole.values, torch.cat([part.values for part in parts]))
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts]))


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_embeddings_are_the_rows_of_the_weights_they_share(form):
    held = FORMS[form](torch.randn(131, 96))
    ids = torch.tensor([[0, 130, 77]])
    found = RowsEmbedding(pack([held], [None], native()), 3.0)(ids)
    expected = held.dequantised()[ids] * 3.0
    if "int" in form or "levels" in form:  # scales are held in float16, and multiplied by that of the embeddings first
        torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * 2**-10, rtol=0)
    else:
        assert torch.equal(found, expected)


@needs_native
def test_embeddings_do_not_count_the_projection_as_a_part_of_theirs():
    assert [*RowsEmbedding(packed([nn.Linear(4, 4)]), 1.0).modules()][1:] == []


@pytest.mark.parametrize("group", [16, 32])
def test_weights_of_4_bits_are_the_nearest_of_16_values_with_the_largest_at_their_end(group):
    weight = torch.randn(30, 96)
    weight[7] = 0
    held = quantise_groups(weight, group)
    assert (held.bits, held.group) == (4, group)
    step = held.scales.abs().repeat_interleave(group, 1)
    error = (held.dequantised() - weight).abs()
    # What lies at the other end than the largest may be a whole step beyond the last value.
    assert bool((error <= step * 1.0001).all())
    assert float((error <= step * 0.5001).float().mean()) > 0.95
    assert not held.dequantised()[7].any()
    assert held.values.view(30, -1, group).amin(2)[0].eq(0).all()


def grouped(bits, group, *, minimum):
    generator = torch.Generator().manual_seed(bits * group)
    values = torch.randint(0, 2**bits, (70, 64), generator=generator).byte()
    scales = torch.rand(70, 64 // group, generator=generator).half().float()
    return GroupedWeight(values, scales, minimum * scales, bits)


def other_levels():
    return attrs.evolve(FORMS["levels4-32"](torch.randn(70, 64)), levels=torch.arange(0, 256, 16).byte())


def reversed_order(held):
    return attrs.evolve(held, order=torch.arange(held.shape[1]).flip(0))


def grouped_once(bits, num_inputs):
    """One group of so many inputs."""
    values = torch.randint(0, 2**bits, (70, num_inputs)).byte()
    return GroupedWeight(values, torch.full((70, 1), 0.01), torch.full((70, 1), -0.08), bits)


@needs_native
@pytest.mark.parametrize(
    ("weights", "form"),
    [
        ([FloatWeight(torch.randn(70, 64).bfloat16())] * 2, "bfloat16"),
        ([FloatWeight(torch.randn(70, 64).bfloat16()), FloatWeight(torch.randn(70, 64))], "float32"),
        ([FloatWeight(torch.randn(70, 64).half())], "float32"),
        ([FloatWeight(torch.randn(70, 64).bfloat16().half())], "bfloat16"),
        ([FloatWeight(torch.randn(70, 64).bfloat16()), quantise(torch.randn(70, 64))], "float32"),
        ([quantise(torch.randn(70, 64))] * 2, "int8"),
        ([grouped(4, 32, minimum=-8.0), grouped(4, 32, minimum=-8.0)], "int4 in groups of 32"),
        ([grouped(4, 32, minimum=-8.0), grouped(4, 32, minimum=-7.5)], "int4 in groups of 32"),
        ([grouped(4, 32, minimum=-8.0), grouped(8, 16, minimum=-32.0)], "int8 in groups of 16"),
        ([grouped(8, 32, minimum=-128.0), quantise(torch.randn(70, 64))], "int8 in groups of 32"),
        ([FORMS["levels4-32"](torch.randn(70, 64))] * 2, "4 bit levels in groups of 32"),
        ([FORMS["levels4-32"](torch.randn(70, 64)), other_levels()], "int8 in groups of 32"),
        ([FORMS["levels4-32"](torch.randn(70, 64)), grouped(4, 16, minimum=-8.0)], "int8 in groups of 16"),
        ([FORMS["e4m3-32"](torch.randn(70, 64))] * 2, "float8_e4m3fn in groups of 32"),
        ([FORMS["e4m3-32"](torch.randn(70, 64)), FORMS["e5m2-one-group"](torch.randn(70, 64))], "float32"),
        ([FORMS["e4m3-32"](torch.randn(70, 64)), grouped(4, 16, minimum=-8.0)], "float32"),
        ([FORMS["int4-scattered-32"](torch.randn(70, 64))] * 2, "int4 in groups of 32, act-order"),
        (
            [FORMS["int4-scattered-32"](torch.randn(70, 64)), FORMS["int8-scattered-16"](torch.randn(70, 64))],
            "int8 in groups of 16, act-order",
        ),
        ([FORMS["int4-scattered-32"](torch.randn(70, 64)), reversed_order(grouped(4, 32, minimum=-8.0))], "bfloat16"),
        ([FORMS["int4-scattered-32"](torch.randn(70, 64)), grouped(4, 16, minimum=-8.0)], "float32"),
        ([reversed_order(grouped_once(4, 2048))], "bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(weight.form for weight in value).replace(" ", "-"),
)
def test_several_forms_become_the_narrowest_that_holds_them_all(weights, form):
    made = pack(weights, [None] * len(weights), native())
    assert made.form == form
    found = made.rows(torch.arange(made.out_features), 1.0)
    expected = torch.cat([weight.dequantised() for weight in weights])
    is_rounded = "bfloat16" in form or (form == "float32" and any("act-order" in weight.form for weight in weights))
    torch.testing.assert_close(found, expected, rtol=2**-8 if is_rounded else 2**-10, atol=2**-9)


@needs_native
def test_one_scale_of_all_groups_is_kept_bit_by_bit():
    held = quantise(torch.randn(70, 64))
    other = GroupedWeight(torch.zeros(3, 64).byte(), torch.ones(3, 4), -torch.ones(3, 4), 4)
    made = pack([held, other], [None, None], native())
    assert made.form == "int8 in groups of 16"
    torch.testing.assert_close(made.rows(torch.arange(70), 1.0), held.dequantised(), rtol=3e-7, atol=0)


@needs_native
def test_a_group_of_more_inputs_than_a_sum_has_room_for_is_refused():
    held = ChannelWeight(torch.zeros(1, 70_000, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="70000 inputs share a scale"):
        pack([held], [None], native())
