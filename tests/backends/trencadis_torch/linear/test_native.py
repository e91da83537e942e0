from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from trencadis_torch.linear.heads import Heads, How
from trencadis_torch.linear.native import ACTIVATIONS, native
from trencadis_torch.linear.packed import quantise

FORMULAS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}
SHAPES = [(1, 1), (3, 5), (63, 7), (64, 64), (65, 33), (130, 100)]
ROWS = [1, 2, 5, 6, 7, 13, 32]


@pytest.fixture(scope="module")
def lib():
    found = native()
    if found is None:
        pytest.skip("there is no C++ compiler on this machine")
    return found


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_float_products_are_those_of_float64(lib, shape, num_rows):
    weight, bias, x = drawn(*shape), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
    expected = x.double() @ weight.double().T + bias
    found = lib.linear_float(x, lib.pack_float(weight), bias, shape[0])
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def exact_rows(x):
    """Return int8 rows and scales from the definition, in float64; no element may lie where float32 could round otherwise."""
    largest = np.abs(x).max(1)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    wanted = x.astype(np.float64) * factor[:, None]
    assert np.abs(np.abs(wanted - np.floor(wanted)) - 0.5).min() > 1e-5
    return np.rint(wanted).astype(np.int64), largest / np.float32(127)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_int8_products_are_those_of_integer_arithmetic(lib, shape, num_rows):
    weight, bias, x = drawn(*shape), drawn(shape[0], seed=1), drawn(num_rows, shape[1], seed=2)
    weights, scales = quantise(weight)
    packed, sums = lib.pack_int8(weights)
    padded = torch.zeros(len(sums))
    padded[: len(scales)] = scales
    rows, row_scales = exact_rows(x.numpy())
    products = rows @ weights.numpy().astype(np.int64).T
    expected = products.astype(np.float32) * scales.numpy() * row_scales[:, None]
    found = lib.linear_int8(x, packed, padded, sums, None, shape[0])
    np.testing.assert_array_equal(found.numpy(), expected)
    biased = lib.linear_int8(x, packed, padded, sums, bias, shape[0])
    np.testing.assert_allclose(biased.numpy(), expected + bias.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_panels", [(1, 1, 1), (3, 2, 1), (2,)])
@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("within", [False, True], ids=["at-borders", "within-panels"])
def test_weights_side_by_side_are_packed_as_if_they_were_one(lib, num_panels, more, within):
    sizes = [count * lib.panel + (3 if within else 0) for count in num_panels]
    sizes[-1] += more
    weights = [drawn(size, 33, seed=size) for size in sizes]
    assert torch.equal(lib.pack_float(*weights), lib.pack_float(torch.cat(weights)))
    rounded = [quantise(weight)[0] for weight in weights]
    for found, expected in zip(lib.pack_int8(*rounded), lib.pack_int8(torch.cat(rounded)), strict=True):
        assert torch.equal(found, expected)


def test_any_number_of_threads_packs_the_same_bits(lib):
    before = torch.get_num_threads()
    weight = drawn(5 * lib.panel + 7, 65)
    packed = {}
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            rounded, scales = quantise(weight)
            packed[num_threads] = (lib.pack_float(weight), *lib.pack_int8(rounded), scales)
    finally:
        torch.set_num_threads(before)
    for parts in packed.values():
        assert all(torch.equal(one, other) for one, other in zip(packed[1], parts, strict=True))


def test_extreme_integers_do_not_saturate(lib):
    weights = torch.full((64, 4096), -127, dtype=torch.int8)
    packed, sums = lib.pack_int8(weights)
    x = torch.ones(2, 4096)
    x[1] = -1
    found = lib.linear_int8(x, packed, torch.ones(64), sums, None, 64)
    assert found[0].tolist() == pytest.approx([-127.0 * 4096] * 64, rel=1e-6)
    assert found[1].tolist() == pytest.approx([127.0 * 4096] * 64, rel=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_rows_bits_depend_neither_on_its_neighbours_nor_on_threads(lib, num_threads):
    weight, x = drawn(700, 390), drawn(40, 390, seed=3)
    weights, scales = quantise(weight)
    packed, (whole, sums) = lib.pack_float(weight), lib.pack_int8(weights)
    padded = torch.zeros(len(sums))
    padded[: len(scales)] = scales
    alone = torch.cat([lib.linear_float(row[None], packed, None, 700) for row in x])
    alone_int8 = torch.cat([lib.linear_int8(row[None], whole, padded, sums, None, 700) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for size in (2, 7, 40):
            assert torch.equal(lib.linear_float(x[:size], packed, None, 700), alone[:size])
            assert torch.equal(lib.linear_int8(x[:size], whole, padded, sums, None, 700), alone_int8[:size])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 20, 32])
def test_what_is_no_number_spoils_its_own_row_alone(lib, wrong, place):
    x = drawn(3, 33)
    x[1, place] = wrong
    packed, sums = lib.pack_int8(torch.ones(64, 33, dtype=torch.int8))
    found = lib.linear_int8(x, packed, torch.ones(64), sums, None, 64)
    assert not torch.isfinite(found[1]).any()
    assert torch.isfinite(found[[0, 2]]).all()


def test_rows_of_zeros_stay_zeros(lib):
    packed, sums = lib.pack_int8(torch.ones(64, 8, dtype=torch.int8))
    assert not lib.linear_int8(torch.zeros(2, 8), packed, torch.ones(64), sums, None, 64).any()


def test_a_view_is_read_by_its_strides(lib):
    x, weight = drawn(10, 6), drawn(5, 10, seed=1)
    expected = x.T @ weight.T
    torch.testing.assert_close(lib.linear_float(x.T, lib.pack_float(weight), None, 5), expected, atol=1e-5, rtol=1e-5)


def test_rows_come_back_bit_by_bit_and_other_ids_are_refused(lib):
    weight = drawn(130, 33)
    packed, ids = lib.pack_float(weight), torch.tensor([[0, 129], [64, 63]])
    assert torch.equal(lib.rows_float(ids, packed, (130, 33), 1.0), weight[ids])
    assert torch.equal(lib.rows_float(ids, packed, (130, 33), 2.0), weight[ids] * 2)
    weights, scales = quantise(weight)
    whole, _ = lib.pack_int8(weights)
    assert torch.equal(lib.rows_int8(ids, whole, scales, (130, 33), 1.0), weights[ids] * scales[ids][..., None])
    for wrong in (-1, 130):
        with pytest.raises(IndexError, match="index 1 of the ids is outside the 130 rows"):
            lib.rows_float(torch.tensor([3, wrong]), packed, (130, 33), 1.0)
        with pytest.raises(IndexError, match="index 0 of the ids"):
            lib.rows_int8(torch.tensor([wrong]), whole, scales, (130, 33), 1.0)


@pytest.mark.parametrize("size", [1, 16, 40, 100])
def test_norms_are_those_of_the_definition(lib, size):
    x, weight = drawn(2, 3, size), drawn(size, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(lib.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 16, 37])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_those_of_the_definition(lib, name, size):
    gates, values = 20 * drawn(4, size), drawn(4, size, seed=1)
    gates[0, 0], gates[1, 0] = 200.0, -200.0
    wide = gates.double()
    activated = FORMULAS[name](wide)
    found = lib.gate(torch.cat([gates, values], -1), ACTIVATIONS[name])
    torch.testing.assert_close(found.double(), activated * values, atol=3e-6, rtol=2e-6)
    torch.testing.assert_close(lib.activate(gates, ACTIVATIONS[name]).double(), activated, atol=3e-6, rtol=2e-6)


@pytest.mark.parametrize("size", [1, 16, 40, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_by_mean_and_variance_are_those_of_the_definition(lib, size, has_bias):
    x, weight, bias = drawn(2, 3, size) + 5, drawn(size, seed=1), drawn(size, seed=2) if has_bias else None
    wide = torch.nn.functional.layer_norm(
        x.double(), (size,), weight.double(), bias.double() if has_bias else None, eps=1e-5
    )
    torch.testing.assert_close(lib.layer_norm(x, weight, bias, 1e-5).double(), wide, atol=2e-5, rtol=1e-5)


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
