from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
import pytest
import torch
from torch.nn import functional

from support.backends.held_forms import FORMS
from support.backends.masked_kernels import MASKS, masked
from trencadis_torch.linear.heads import Heads, How
from trencadis_torch.linear.held import ChannelWeight, Float8Weight, FloatWeight, GroupedWeight
from trencadis_torch.linear.native import ACTIVATIONS, native
from trencadis_torch.linear.packed import pack, quantise

FORMULAS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}
SHAPES = [(1, 1), (3, 5), (63, 7), (64, 64), (65, 33), (130, 100)]
ROWS = [1, 2, 5, 6, 7, 13, 32]


@pytest.fixture(scope="module", params=MASKS)
def lib(request):
    found = masked(request.param)
    if found is None:
        pytest.skip(f"this machine does not run or compile for {request.param}")
    return found


@pytest.fixture
def in_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def layer(lib, held, bias=None):
    return pack([held], [bias], lib)


def test_float_products_are_those_of_float64(lib):
    for shape, num_rows in itertools.product(SHAPES, ROWS):
        weight, bias, x = drawn(*shape), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
        expected = x.double() @ weight.double().T + bias
        found = layer(lib, FloatWeight(weight), bias)(x)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_products_of_bfloat16_are_those_of_the_same_weights_in_float32_bit_by_bit(lib):
    for shape, num_rows in itertools.product(SHAPES, ROWS):
        weight, bias, x = drawn(*shape).bfloat16(), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
        found = layer(lib, FloatWeight(weight), bias)
        assert found.form == "bfloat16"
        assert torch.equal(found(x), layer(lib, FloatWeight(weight.float()), bias)(x)), (shape, num_rows)


def test_rows_that_are_rounded_to_bfloat16_give_the_products_of_rounded_rows(lib):
    for shape, num_rows in itertools.product([*SHAPES, (70, 300)], ROWS):
        weight, bias, x = drawn(*shape).bfloat16(), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
        x[0, 0] = 1 + 2.0**-8  # halfway: to the even one
        made = layer(lib, FloatWeight(weight, rounds_rows=True), bias)
        assert made.form == "bfloat16, rows too"
        rows, wide = x.bfloat16().double(), weight.double()
        # Each addition in float32 is within half a unit of the sum so far, which no sum of magnitudes is below.
        most = rows.abs() @ wide.abs().T + bias.abs()
        error = (made(x).double() - (rows @ wide.T + bias)).abs()
        assert bool((error <= 2.0**-24 * (shape[1] + 2) * most).all()), (shape, num_rows)


def exact_rows(x):
    """Return int8 rows and scales from the definition, in float64; no element may lie where float32 could round otherwise."""
    largest = np.abs(x).max(-1)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    wanted = x.astype(np.float64) * factor[..., None]
    assert np.abs(np.abs(wanted - np.floor(wanted)) - 0.5).min() > 1e-6
    return np.rint(wanted).astype(np.int64), largest / np.float32(127)


def test_int8_products_are_those_of_integer_arithmetic(lib):
    for shape, num_rows in itertools.product(SHAPES, ROWS):
        weight, bias, x = drawn(*shape), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
        held = quantise(weight)
        rows, row_scales = exact_rows(x.numpy())
        products = rows @ held.values.numpy().astype(np.int64).T
        expected = products.astype(np.float32) * row_scales[:, None] * held.scales.numpy()
        np.testing.assert_array_equal(layer(lib, held)(x).numpy(), expected)
        biased = layer(lib, held, bias)(x)
        np.testing.assert_allclose(biased.numpy(), expected + bias.numpy(), rtol=1e-6, atol=1e-6)


GROUPS = [
    (1, 1),
    (5, 1),
    (7, 7),
    (33, 11),
    (32, 16),
    (160, 16),
    (96, 32),
    (96, 48),
    (128, 64),
    (256, 128),
    (390, 390),
    (600, 200),
]
"""Inputs, and those of a group."""


def integers(num_outputs, num_inputs, group, bits, *, minimum):
    """Return weights whose scales and minimums float16 holds."""
    generator = torch.Generator().manual_seed(num_inputs + bits)
    values = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=generator).byte()
    scales = (1 + torch.rand(num_outputs, num_inputs // group, generator=generator)).half().float()
    minimums = -(2 ** (bits - 1)) * scales if minimum is None else minimum * drawn(*scales.shape, seed=4).half().float()
    return GroupedWeight(values, scales, minimums, bits)


@pytest.mark.parametrize("minimum", [None, 1.0], ids=["symmetric", "minimums"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_in_groups_are_those_of_integer_arithmetic(lib, bits, minimum):
    for (num_inputs, group), num_rows in itertools.product(GROUPS, [1, 3, 7, 13]):
        held = integers(67, num_inputs, group, bits, minimum=minimum)
        x, bias = drawn(num_rows, num_inputs, seed=2), drawn(67, seed=1)
        made = layer(lib, held, bias)
        assert made.packed.zero == (2 ** (bits - 1) if minimum is None else -1)
        rows, row_scales = exact_rows(x.numpy().reshape(num_rows, -1, group))
        values = held.values.numpy().astype(np.int64).reshape(67, -1, group)
        sums = np.einsum("mgk,ngk->mng", rows, values) * (held.scales.numpy().astype(np.float64))
        sums += rows.sum(-1)[:, None] * held.minimums.numpy().astype(np.float64)
        terms = sums * row_scales[:, None].astype(np.float64)
        found = made(x).numpy()
        assert (np.abs(found - terms.sum(-1) - bias.numpy()) <= 1e-5 * (np.abs(terms).sum(-1) + 10)).all(), (
            num_inputs,
            group,
            num_rows,
        )


def test_products_of_a_table_are_those_of_its_integers_in_8_bits_bit_by_bit(lib):
    for (num_inputs, group), num_rows in itertools.product(GROUPS, [1, 3, 7, 13]):
        held = integers(67, num_inputs, group, 4, minimum=None)
        levels = torch.tensor([255, 0, *range(17, 241, 16)], dtype=torch.uint8)
        held = attrs.evolve(held, levels=levels, minimums=-113 * held.scales)
        x, bias = drawn(num_rows, num_inputs, seed=2), drawn(67, seed=1)
        made = layer(lib, held, bias)
        wide = GroupedWeight(levels[held.values.int()], held.scales, held.minimums, 8)
        assert made.form == f"4 bit levels in groups of {group}"
        assert made.packed.weights.numel() < 0.9 * layer(lib, wide).packed.weights.numel() or group < 16
        assert torch.equal(made(x), layer(lib, wide, bias)(x)), (num_inputs, group, num_rows)


def test_a_table_whose_groups_have_zeros_of_their_own_is_held_in_8_bits(lib):
    held = integers(67, 96, 32, 4, minimum=1.0)
    held = attrs.evolve(held, levels=torch.arange(0, 160, 10).byte())
    made, x = layer(lib, held), drawn(3, 96)
    assert made.form == "int8 in groups of 32"
    wide = GroupedWeight(held.levels[held.values.int()], held.scales, held.minimums, 8)
    assert torch.equal(made(x), layer(lib, wide)(x))


@pytest.mark.parametrize("minimum", [None, 1.0], ids=["symmetric", "minimums"])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_lie_apart_are_those_of_inputs_in_their_order_bit_by_bit(lib, bits, minimum):
    for num_inputs, group in GROUPS:
        held = integers(67, num_inputs, group, bits, minimum=minimum)
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))
        made, x = layer(lib, attrs.evolve(held, order=order)), drawn(7, num_inputs, seed=2)
        assert torch.equal(made(x), layer(lib, held)(x[:, order])), (num_inputs, group)
        rows = layer(lib, held).rows(torch.arange(67), 1.0)
        assert torch.equal(made.rows(torch.arange(67), 1.0)[:, order], rows), (num_inputs, group)


def test_every_float_of_8_bits_is_widened_exactly(lib):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256).byte().view(dtype)
        every = every[every.float().isfinite()]
        values = every.view(torch.uint8).repeat(2, 1).view(dtype).T.contiguous()  # an output for each
        held = Float8Weight(values, torch.ones(len(every), 1))
        x = torch.tensor([[1.0, 0.0], [0.0, 2.0**-20]])
        found, expected = layer(lib, held)(x), every.float()
        assert torch.equal(found, torch.stack([expected, expected * 2.0**-20]))
        assert torch.equal(layer(lib, held).rows(torch.arange(len(every)), 1.0), expected[:, None].expand(-1, 2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_8_bit_floats_are_those_of_float64(lib, dtype):
    for (num_inputs, group), num_rows in itertools.product(GROUPS, [1, 3, 7]):
        values = drawn(67, num_inputs).to(dtype)
        held = Float8Weight(values, (1 + drawn(67, num_inputs // group, seed=3).abs()).half().float())
        x, bias = drawn(num_rows, num_inputs, seed=2), drawn(67, seed=1)
        terms = x.double()[:, None] * held.dequantised().double()
        error = (layer(lib, held, bias)(x).double() - terms.sum(-1) - bias).abs()
        assert bool((error <= 1e-6 * (terms.abs().sum(-1) + bias.abs() + 1)).all()), (num_inputs, group, num_rows)


def test_extreme_integers_do_not_saturate(lib):
    """All products at their largest, which float32 holds: scales are 1, and so are those of the rows."""
    for bits, (num_inputs, group) in itertools.product((4, 8), [(64, 16), (64, 32), (256, 128), (250, 250)]):
        values = torch.full((64, num_inputs), 2**bits - 1, dtype=torch.uint8)
        ones = torch.ones(64, num_inputs // group)
        x = torch.full((2, num_inputs), 127.0)
        x[1] = -127
        for minimum in (-(2.0 ** (bits - 1)), -3.5):
            found = layer(lib, GroupedWeight(values, ones, minimum * ones, bits))(x)
            expected = (2**bits - 1 + minimum) * 127.0 * num_inputs
            assert found[0].tolist() == [expected] * 64
            assert found[1].tolist() == [-expected] * 64


def test_extreme_integers_of_channels_do_not_saturate(lib):
    held = ChannelWeight(torch.full((64, 4096), -127, dtype=torch.int8), torch.ones(64))
    x = torch.ones(2, 4096)
    x[1] = -1
    found = layer(lib, held)(x)
    assert found[0].tolist() == pytest.approx([-127.0 * 4096] * 64, rel=1e-6)
    assert found[1].tolist() == pytest.approx([127.0 * 4096] * 64, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_weights_side_by_side_are_packed_as_if_they_were_one(lib, form):
    for num_panels, more, within in itertools.product([(1, 1, 1), (3, 2, 1), (2,)], [0, 5], [False, True]):
        sizes = [count * lib.panel + (3 if within else 0) for count in num_panels]
        sizes[-1] += more
        weights = [drawn(size, 33, seed=size) for size in sizes]
        found = pack([FORMS[form](weight) for weight in weights], [None] * len(weights), lib).packed
        expected = pack([FORMS[form](torch.cat(weights))], [None], lib).packed
        for one, other in zip(found, expected, strict=True):
            assert same(one, other), (num_panels, more, within)


def test_any_number_of_threads_packs_the_same_bits(lib, in_threads):
    for form in FORMS:
        packed = []
        for num_threads in (1, 2, 3):
            in_threads(num_threads)
            packed.append(layer(lib, FORMS[form](drawn(5 * lib.panel + 7, 65))).packed)
        for parts in packed:
            for one, other in zip(packed[0], parts, strict=True):
                assert same(one, other), form


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_depend_neither_on_its_neighbours_nor_on_threads(lib, form, in_threads):
    made, x = layer(lib, FORMS[form](drawn(700, 390))), drawn(61, 390, seed=3)
    in_threads(1)
    alone = torch.cat([made(row[None]) for row in x])
    for num_threads, sizes in ((1, (*range(1, 41), 48, 49, 61)), (2, (5, 41)), (3, (13, 61))):
        in_threads(num_threads)
        for size in sizes:
            assert torch.equal(made(x[:size]), alone[:size]), (num_threads, size)
        assert torch.equal(made(x[17:]), alone[17:]), num_threads


@pytest.mark.parametrize("form", FORMS)
def test_sums_that_wait_between_parts_of_the_inputs_keep_their_bits(lib, form):
    for num_inputs, num_rows in [*((size, 13) for size in (127, 128, 129, 255, 256, 257, 384)), (160, 7), (416, 250)]:
        made, x = layer(lib, FORMS[form](drawn(130, num_inputs))), drawn(num_rows, num_inputs, seed=3)
        assert torch.equal(made(x), torch.cat([made(row[None]) for row in x])), (num_inputs, num_rows)


def test_what_is_no_number_spoils_its_own_row_alone(lib):
    for form, wrong, place in itertools.product(FORMS, [math.nan, math.inf, -math.inf], [0, 20, 32]):
        x = drawn(3, 33)
        x[1, place] = wrong
        found = layer(lib, FORMS[form](1 + drawn(64, 33).abs()))(x)
        assert not torch.isfinite(found[1]).any(), (form, wrong, place)
        assert torch.isfinite(found[[0, 2]]).all(), (form, wrong, place)


def test_what_is_no_number_stays_none_where_rows_are_rounded(lib):
    for bits in (0x7F800001, 0x7FFFFFFF, -1):
        x = drawn(2, 33)
        x[1, 20] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        found = layer(lib, FORMS["bfloat16-rows-too"](1 + drawn(64, 33).abs()))(x)
        assert found[1].isnan().all(), bits
        assert torch.isfinite(found[0]).all(), bits


def test_a_view_is_read_by_its_strides(lib):
    x, weight = drawn(10, 6), drawn(5, 10, seed=1)
    expected = x.T @ weight.T
    torch.testing.assert_close(layer(lib, FloatWeight(weight))(x.T), expected, atol=1e-5, rtol=1e-5)


def test_rows_come_back_bit_by_bit_and_other_ids_are_refused(lib):
    ids = torch.tensor([[0, 129], [64, 63]])
    helds = [FORMS[form](drawn(130, 33)) for form in ("float32", "bfloat16", "int8")]
    helds += [integers(130, 33, 11, bits, minimum=minimum) for bits in (4, 8) for minimum in (None, 1.0)]
    for held in helds:
        made = layer(lib, held)
        torch.testing.assert_close(
            made.rows(ids, 1.0), held.dequantised()[ids], rtol=3e-7, atol=1e-5 if "in" in held.form else 0
        )
        assert torch.equal(made.rows(ids, 2.0), made.rows(ids, 1.0) * 2)
        for wrong in (-1, 130):
            with pytest.raises(IndexError, match="index 1 of the ids is outside the 130 rows"):
                made.rows(torch.tensor([3, wrong]), 1.0)


def test_gates_are_those_of_the_definition(lib):
    for name, size in itertools.product(ACTIVATIONS, [1, 16, 37]):
        gates, values = 20 * drawn(4, size), drawn(4, size, seed=1)
        gates[0, 0], gates[1, 0] = 200.0, -200.0
        wide = gates.double()
        activated = FORMULAS[name](wide)
        found = lib.gate(torch.cat([gates, values], -1), ACTIVATIONS[name])
        torch.testing.assert_close(found.double(), activated * values, atol=3e-6, rtol=2e-6)
        torch.testing.assert_close(lib.activate(gates, ACTIVATIONS[name]).double(), activated, atol=3e-6, rtol=2e-6)


def test_norms_are_those_of_the_definition(lib):
    for size, has_bias in itertools.product([1, 16, 40, 100], [False, True]):
        x, weight, bias = drawn(2, 3, size), drawn(size, seed=1), drawn(size, seed=2) if has_bias else None
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        torch.testing.assert_close(lib.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-6)
        wide = functional.layer_norm(wide + 5, (size,), weight.double(), bias.double() if has_bias else None, eps=1e-5)
        torch.testing.assert_close(lib.layer_norm(x + 5, weight, bias, 1e-5).double(), wide, atol=2e-5, rtol=1e-5)


def test_only_the_turned_elements_of_queries_and_keys_change(lib):
    heads, kv_heads, size, turned, tokens = 3, 2, 10, 6, 4
    x = drawn(tokens, (heads + 2 * kv_heads) * size)
    angles = drawn(tokens, turned // 2, seed=1).repeat(1, 2)
    found = x.clone()
    lib.rotate(found, Heads(num_heads=heads, num_kv_heads=kv_heads, head_dim=size), (angles.cos(), angles.sin()))
    before, after = x.view(tokens, -1, size), found.view(tokens, -1, size)
    assert torch.equal(after[:, heads + kv_heads :], before[:, heads + kv_heads :])
    assert torch.equal(after[..., turned:], before[..., turned:])
    pairs = torch.complex(before[:, :5, :3].double(), before[:, :5, 3:6].double())
    expected = pairs * torch.exp(1j * angles[:, None, :3].double())
    torch.testing.assert_close(after[:, :5, :3].double(), expected.real, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after[:, :5, 3:6].double(), expected.imag, atol=1e-6, rtol=1e-6)


def test_heads_turn_in_pairs_and_norms_have_their_places(lib):
    heads, kv_heads, size, tokens = 3, 2, 10, 4
    x = drawn(tokens, (heads + 2 * kv_heads) * size)
    angles = drawn(tokens, size // 2, seed=1)
    given = [torch.cat([one, one], -1) for one in (angles.cos(), angles.sin())]
    turn = torch.exp(1j * angles[:, None].double())
    for how, whole in ((How.PAIRS, False), (How.PAIRS | How.NORMS_AFTER, False), (How.PAIRS | How.NORMS_WHOLE, True)):
        widths = (heads * size, kv_heads * size)
        weights = [drawn(width if whole else size, seed=3 + i) for i, width in enumerate(widths)]
        found = x.clone()
        lib.rotate(
            found,
            Heads(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                query_norm=weights[0],
                key_norm=weights[1],
                eps=1e-5,
                how=how,
            ),
            tuple(given),
        )
        for part, after, weight in zip(
            x.split((*widths, widths[1]), -1), found.split((*widths, widths[1]), -1), weights, strict=False
        ):
            rows = part.double() if whole else part.double().unflatten(-1, (-1, size))
            norm = lambda y, w=weight: y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w  # noqa: E731
            rows = rows if How.NORMS_AFTER in how else norm(rows)
            turned = torch.view_as_complex(rows.reshape(tokens, -1, size // 2, 2)) * turn
            expected = torch.view_as_real(turned).flatten(-2)
            expected = norm(expected) if How.NORMS_AFTER in how else expected
            torch.testing.assert_close(after.double(), expected.flatten(1), atol=2e-6, rtol=2e-6)
        assert torch.equal(found[:, sum(widths) :], x[:, sum(widths) :])


def test_without_a_compiler_there_is_a_line_in_the_log_and_no_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO", logger="trencadis.torch"):
        assert native.__wrapped__() is None
    assert "PyTorch's own kernels: linear.cpp: no C++ compiler" in caplog.text
