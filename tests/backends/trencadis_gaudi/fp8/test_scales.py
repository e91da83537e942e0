from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.fp8_scene import numbers, rounded
from trencadis.errors import BackendError
from trencadis_gaudi.emulated.device import EmulatedDeviceError
from trencadis_gaudi.emulated.float8 import copy_by_index, register_operations
from trencadis_gaudi.fp8.operations import NAMES, fp8_product, from_fp8, to_fp8
from trencadis_gaudi.fp8.scales import (
    FP8,
    GAUDI2,
    GAUDI3,
    activation_scale,
    device_of,
    quantise,
    scale_of,
    weight_scale,
)

DEVICES = (GAUDI2, GAUDI3)
ROUNDINGS = ("hw", "pow2", "none", "unit")
MAGNITUDES = st.floats(2.0**-20, 2.0**20, width=32)


def exactly(maxabs, device, rounding, backoff):
    """The quantiser's formulas, in Python numbers."""
    scale = maxabs / (device.largest * backoff)
    if rounding == "unit":
        return 1.0
    if rounding == "none":
        return scale
    power = math.ceil(math.log2(scale))
    if rounding == "hw":
        smallest, largest = device.exponents
        power = min(max(math.ceil(power / device.step) * device.step, smallest), largest)
    return 2.0**power


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(maxabs=MAGNITUDES, backoff=st.sampled_from([0.25, 0.5, 1.0]))
def test_scale_is_that_of_the_quantisers_formulas(device, rounding, maxabs, backoff):
    found = float(scale_of(torch.tensor(maxabs), device, rounding=rounding, backoff=backoff))
    assert found == pytest.approx(exactly(maxabs, device, rounding, backoff), rel=1e-6)


@pytest.mark.parametrize(
    ("device", "scales"),
    [(GAUDI2, [16.0, 1.0, 2.0**-4, 2.0**-8]), (GAUDI3, [2.0**power for power in range(7, -56, -1)])],
)
def test_hardware_scales_are_those_of_the_device(device, scales):
    magnitudes = torch.exp2(torch.arange(-80.0, 40.0, 0.5))
    assert set(scale_of(magnitudes, device, rounding="hw", backoff=1.0).tolist()) == set(scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("rounding", ["hw", "pow2", "none"])
@settings(max_examples=60)
@given(data=st.data())
def test_dequantised_weight_is_within_a_sixteenth_of_the_weight(device, per_channel, rounding, data):
    """Of numbers above the smallest normal one; below, within half a step of it. Nothing is infinite."""
    rows = data.draw(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4), min_size=1, max_size=4))
    weight = torch.tensor(rows)
    scale = weight_scale(weight, device, rounding=rounding, per_channel=per_channel)
    assert scale.shape == ((len(rows),) if per_channel else (1,))
    assert (scale > 0).all()
    stored = quantise(weight, scale, device).float()
    assert stored.isfinite().all()
    assert (stored.abs() <= device.largest).all()
    error = (stored * scale[:, None] - weight).abs()
    bound = torch.maximum(weight.abs() * 2.0**-4, scale[:, None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()


def test_out_of_range_saturates_and_rounding_is_exact():
    weight = torch.tensor([[1e5, -1e5, 3.3], [0.01, -0.2, 250.0]])
    found = quantise(weight, torch.tensor([1.0]), GAUDI2).float()
    assert np.array_equal(found.numpy(), rounded(weight.numpy()))
    assert quantise(weight, torch.tensor([1.0]), GAUDI3).float().abs().max() == 448


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_magnitudes_at_the_edges_have_scales_with_inverses(rounding):
    edges = torch.tensor([0.0, 1e-45, 1e-38, 3e38])
    scales = scale_of(edges, GAUDI2, rounding=rounding, backoff=0.5)
    assert scales[0] == 1
    assert (1 / scales).isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("device", DEVICES)
@given(maxabs=MAGNITUDES)
def test_inverse_of_an_activations_scale_is_exact_in_bfloat16(device, maxabs):
    scale = activation_scale(maxabs, device, rounding="none")
    assert float(1 / scale) == pytest.approx(float((1 / scale).bfloat16()), rel=2e-7)
    assert float(scale) == pytest.approx(maxabs / device.largest * 4, rel=2**-8)


def test_device_is_the_one_that_the_software_finds():
    kinds = SimpleNamespace(synDeviceGaudi2=4, synDeviceGaudi3=5)
    for number, device in ((4, GAUDI2), (5, GAUDI3)):
        assert device_of(SimpleNamespace(_get_device_type=lambda n=number: n, synDeviceType=kinds)) is device
    with pytest.raises(BackendError, match="no Gaudi 2 or Gaudi 3"):
        device_of(SimpleNamespace(_get_device_type=lambda: 1, synDeviceType=kinds))


HPU = torch.ops.hpu


@pytest.fixture(autouse=True, scope="module")
def operations():
    register_operations()


def values(*shape, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def doubles(stored):
    return stored.float().double().numpy()


@pytest.mark.parametrize("scale", [1.0, 0.25, 16.0, 0.37])
def test_cast_rounds_to_the_nearest_number_and_saturates_as_a_gaudi_2(scale):
    halves = torch.tensor([(a + b) / 2 for a, b in zip(numbers(), numbers()[1:], strict=False)])
    given = torch.cat([values(400), torch.tensor(numbers()), halves, -halves, torch.tensor([1e6, -1e6, 241.0, 250.0])])
    expected = rounded((given * torch.tensor(scale)).numpy())
    assert np.array_equal(doubles(to_fp8(given, torch.tensor(scale))), expected)
    assert np.abs(expected).max() == 240


def test_cast_scales_each_row_in_the_type_of_its_input():
    given, scales = values(5, 40).bfloat16(), torch.tensor([[1.0], [0.5], [3.0], [0.0625], [1.3]])
    expected = rounded((given * scales.bfloat16()).float().numpy())
    assert np.array_equal(doubles(to_fp8(given, scales)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_back_multiplies_by_the_scale(dtype):
    stored = torch.tensor([*numbers(), *(-number for number in numbers())]).to(FP8)
    found = from_fp8(stored, torch.tensor(0.125), dtype)
    assert found.dtype is dtype
    assert np.array_equal(doubles(found), doubles(stored) * 0.125)


@pytest.mark.parametrize("scales", [((), (1,)), ((7, 1), (9,)), ((7, 1), (1,)), ((), (9,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_that_of_the_numbers_that_fp8_stands_for(scales, dtype):
    a, b = values(7, 33).to(FP8), values(9, 33, seed=1).to(FP8)
    one, other = (0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(2)) for shape in scales)
    exact = doubles(a) @ doubles(b).T * one.double().numpy() * other.double().numpy()
    found = fp8_product(a, b, scale=one, weight_scale=other, dtype=dtype)
    size = np.abs(doubles(a)) @ np.abs(doubles(b)).T * one.double().numpy() * other.double().numpy()
    assert found.dtype is dtype
    assert (np.abs(doubles(found) - exact) <= size * (1e-6 if dtype is torch.float32 else 2**-8)).all()


def test_product_adds_a_bias_that_is_not_scaled():
    a, b, bias = values(3, 8).to(FP8), values(4, 8, seed=1).to(FP8), values(4, seed=2)
    args = (a, False, b, True, None, torch.float32, torch.tensor(0.5), torch.full((4,), 2.0))
    torch.testing.assert_close(HPU.fp8_gemm_v2(*args, bias), HPU.fp8_gemm_v2(*args) + bias)
    torch.testing.assert_close(
        HPU.fp8_gemm_v2(a.T, True, b.T, False, None, torch.float32),
        HPU.fp8_gemm_v2(a, False, b, True, None, torch.float32),
    )


def test_largest_magnitude_comes_with_the_cast_if_asked_for():
    given = values(6, 5)
    assert HPU.cast_to_fp8_v2(given, None, False, True, FP8)[1] == given.abs().max()
    assert HPU.cast_to_fp8_v2(given, None, False, False, FP8)[1].numel() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: HPU.cast_to_fp8_v2(torch.ones(2).half(), None, False, False, FP8),
        lambda: HPU.cast_to_fp8_v2(torch.ones(2), None, True, False, FP8),
        lambda: HPU.cast_from_fp8(torch.ones(2).to(FP8), None, torch.float16),
        lambda: HPU.fp8_gemm_v2(torch.ones(2, 2), False, torch.ones(2, 2), True, None, torch.float32),
    ],
)
def test_types_that_the_device_refuses_are_refused(call):
    with pytest.raises(EmulatedDeviceError):
        call()


def test_shapes_are_known_without_running():
    a, b = torch.empty(2, 4, dtype=FP8, device="meta"), torch.empty(3, 4, dtype=FP8, device="meta")
    one = torch.empty((), device="meta")
    assert fp8_product(a, b, scale=one, weight_scale=one, dtype=torch.bfloat16).shape == (2, 3)
    assert to_fp8(torch.empty(5, device="meta"), one).dtype is FP8
    assert all(hasattr(HPU, name) for name in NAMES)


def test_rows_are_copied_by_index_on_the_cpu():
    cache, new = torch.zeros(6, 2).to(FP8), values(2, 2).to(FP8)
    assert copy_by_index(cache, 0, torch.tensor([4, 1]), new) is cache
    assert torch.equal(cache.float()[[4, 1]], new.float())
    assert not cache.float()[[0, 2, 3, 5]].any()
