from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.fp8_scene import rounded
from trencadis.errors import BackendError
from trencadis_gaudi.fp8.scales import (
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
