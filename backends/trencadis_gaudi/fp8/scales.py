"""Fp8 scales: an fp8 number times its scale is the number that it represents.

scale = largest magnitude / (largest number of the device × backoff), rounded by the method. Backoff leaves room for magnitudes beyond the
calibration's. A power of two loses no precision, since its products are exact except for the smallest numbers.

Source: intel/neural-compressor 9b47d09b, fp8_quant/_core/fp_utils.py (ranges, lists of scales), scale_methods/round_scales_function.py
(rounding), scale_methods/scale_method_config.py (backoff). gaudi-pytorch-bridge 1.19.0, tests/pytest_working/any_mode/
test_hpu_fp8_ops_any_mode.py: a Gaudi 2 saturates at 240, a Gaudi 3 at 448.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import torch

from trencadis.errors import BackendError

__all__ = [
    "FP8",
    "GAUDI2",
    "GAUDI3",
    "Fp8Device",
    "activation_scale",
    "device_of",
    "quantise",
    "scale_of",
    "weight_scale",
]

FP8: Final = torch.float8_e4m3fn

_WEIGHT_BACKOFF, _ACTIVATION_BACKOFF = 0.5, 0.25
_SMALLEST, _LARGEST = -126, 126
"""Exponents of powers of two that float32 represents together with their inverses."""


@attrs.frozen
class Fp8Device:
    """Range of a device's ``float8_e4m3fn``, and the scales that its matrix unit applies without cost.

    Attributes:
        name: Name of the device, such as ``Gaudi 2``.
        largest: Magnitude at which the device saturates.
        exponents: Smallest and largest exponent (base 2) of these scales.
        step: Difference between successive exponents.
    """

    name: str
    largest: float
    exponents: tuple[int, int]
    step: int


GAUDI2: Final = Fp8Device("Gaudi 2", 240.0, (-8, 4), 4)
GAUDI3: Final = Fp8Device("Gaudi 3", 448.0, (-55, 7), 1)


def device_of(experimental: Any) -> Fp8Device:
    """Return the fp8 range of the device that the Gaudi software finds.

    Args:
        experimental: Module ``habana_frameworks.torch.utils.experimental``.

    Raises:
        BackendError: The device does not compute fp8.
    """
    kind, kinds = experimental._get_device_type(), experimental.synDeviceType  # noqa: SLF001 - the vendor's only name
    for name, device in (("synDeviceGaudi2", GAUDI2), ("synDeviceGaudi3", GAUDI3)):
        if kind == getattr(kinds, name):
            return device
    raise BackendError(
        f"[backend.gaudi] fp8 or kv_cache_dtype asks for fp8; this device, {kind}, is no Gaudi 2 or Gaudi 3.",
        hint='Set fp8 = "off" and kv_cache_dtype = "auto".',
    )


def scale_of(maxabs: torch.Tensor, device: Fp8Device, *, rounding: str, backoff: float) -> torch.Tensor:
    """Return scales, float32, all above zero; 1 for a magnitude of zero. Pure.

    Args:
        maxabs: Largest magnitudes, any shape.
        device: Fp8 range of the device.
        rounding: Rounding of scales: ``hw``, ``pow2``, ``none`` or ``unit``.
        backoff: Share of the range to use, above 0 to 1.
    """
    plain = (maxabs.double() / (device.largest * backoff)).clamp_min(2.0**_SMALLEST)
    if rounding in {"pow2", "hw"}:
        mantissa, exponent = torch.frexp(plain)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exponent = exponent.clamp(_SMALLEST, _LARGEST)
        if rounding == "hw":
            exponent = (torch.ceil(exponent / device.step) * device.step).clamp(*device.exponents)
        plain = torch.exp2(exponent.double())
    one = rounding == "unit"
    return torch.where((maxabs == 0) | one, torch.ones_like(plain), plain).float()


def weight_scale(weight: torch.Tensor, device: Fp8Device, *, rounding: str, per_channel: bool) -> torch.Tensor:
    """Return the scale of a weight ``[out, in]``: ``[out]`` per channel, else ``[1]``. Pure."""
    maxabs = weight.float().abs()
    maxabs = maxabs.amax(1) if per_channel else maxabs.amax().view(1)
    return scale_of(maxabs, device, rounding=rounding, backoff=_WEIGHT_BACKOFF)


def activation_scale(maxabs: float, device: Fp8Device, *, rounding: str) -> torch.Tensor:
    """Return the scale of an activation, one element; its inverse is exact in bfloat16, in which a cast multiplies. Pure."""
    scale = scale_of(torch.tensor(maxabs), device, rounding=rounding, backoff=_ACTIVATION_BACKOFF)
    return 1 / (1 / scale).bfloat16().float()


def quantise(weight: torch.Tensor, scale: torch.Tensor, device: Fp8Device) -> torch.Tensor:
    """Return a weight ``[out, in]`` in fp8, saturated to the range. Pure.

    Args:
        weight: Weight in the model's type, ``[out, in]``.
        scale: Scale of the weight, ``[out]`` or ``[1]``.
        device: Fp8 range of the device.
    """
    return (weight.float() / scale[:, None]).clamp(-device.largest, device.largest).to(FP8)
