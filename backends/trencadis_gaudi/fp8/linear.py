"""Linear layers in fp8: weights are rounded once on the CPU, activations with a measured scale or one for each token."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis_gaudi.fp8.measurements import Measurements
from trencadis_gaudi.fp8.methods import ScaleMethod
from trencadis_gaudi.fp8.operations import fp8_product, to_fp8
from trencadis_gaudi.fp8.scales import Fp8Device, activation_scale, quantise, weight_scale

__all__ = ["DynamicLinear", "StaticLinear", "quantise_linears"]

logger = logging.getLogger("trencadis.gaudi")

_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
"""Names of layers that route tokens to experts."""
_PART = ".local"
"""Suffix of the name of one rank's part of a layer, as set by ``trencadis_torch.parallel.modules``."""
_LEAST = 1e-8
"""Lower bound of the largest magnitude of a token."""


class _Fp8Linear(nn.Module):
    """Linear layer with an fp8 weight; the unscaled bias is added to the product.

    Args:
        linear: Original layer.
        device: Fp8 range of the device.
        method: Scale method of the weight.
    """

    weight_scale: torch.Tensor

    def __init__(self, linear: nn.Linear, device: Fp8Device, method: ScaleMethod) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = weight_scale(linear.weight, device, rounding=method.weights, per_channel=method.per_channel)
        self.weight = nn.Parameter(quantise(linear.weight, scale, device), requires_grad=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        self.bias = linear.bias

    def _product(self, values: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the layer's result in the leading shape and type of its input ``like``."""
        product = fp8_product(values, self.weight, scale=scale, weight_scale=self.weight_scale, dtype=like.dtype)
        product = product.view(*like.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


class StaticLinear(_Fp8Linear):
    """Fp8 linear layer with one measured scale for activations.

    Args:
        linear: Original layer.
        device: Fp8 range of the device.
        method: Scale method of weight and activations.
        maxabs: Largest magnitude of the layer's input.
    """

    scale: torch.Tensor
    inverse: torch.Tensor

    def __init__(self, linear: nn.Linear, device: Fp8Device, method: ScaleMethod, *, maxabs: float) -> None:
        super().__init__(linear, device, method)
        scale = activation_scale(maxabs, device, rounding=method.activations)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("inverse", 1 / scale, persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out]`` of ``[…, in]``."""
        return self._product(to_fp8(values.reshape(-1, self.in_features), self.inverse), self.scale, values)


class DynamicLinear(_Fp8Linear):
    """Fp8 linear layer with a scale for each token: the smallest power of two that represents its largest magnitude.

    Args:
        linear: Original layer.
        device: Fp8 range of the device.
        method: Scale method of the weight.
    """

    def __init__(self, linear: nn.Linear, device: Fp8Device, method: ScaleMethod) -> None:
        super().__init__(linear, device, method)
        self._largest = device.largest

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out]`` of ``[…, in]``."""
        tokens = values.reshape(-1, self.in_features)
        maxabs = tokens.abs().amax(-1, keepdim=True).float().clamp_min(_LEAST)
        scale = torch.exp2(torch.ceil(torch.log2(maxabs / self._largest)))
        return self._product(to_fp8(tokens, 1 / scale), scale, values)


@torch.no_grad()
def quantise_linears(
    model: Any,
    device: Fp8Device,
    method: ScaleMethod,
    *,
    measurements: Measurements | None,
    exclude: Sequence[str],
    is_share: bool = False,
) -> str:
    """Replace the linear layers of a decoder in place, on the CPU; return a digest of all scales.

    The output layer and the routers of experts stay as they are.

    Args:
        model: Model of transformers.
        device: Fp8 range of the device.
        method: Scale method of the layers.
        measurements: Measured magnitudes of the inputs; None: dynamic scales.
        exclude: Patterns searched for in the names of layers; matching layers stay unquantised.
        is_share: Whether the layers are one rank's parts.

    Raises:
        ModelLoadError: There is no such layer, or a measurement is missing or does not fit.
    """
    found = _linears(model, exclude)
    if not found:
        raise ModelLoadError(
            f"{type(model).__name__} has no linear layer for fp8, but for its output layer, routers and what fp8_exclude names.",
            hint='Set [backend.gaudi] fp8 = "off".',
        )
    digest = hashlib.blake2b(digest_size=16)
    for name, linear in found.items():
        layer: _Fp8Linear
        if measurements is None:
            layer = DynamicLinear(linear, device, method)
        else:
            maxabs = measurements.input_of(name.removesuffix(_PART), linear, is_part=is_share)
            layer = StaticLinear(linear, device, method, maxabs=maxabs)
        for buffer in layer.buffers():
            digest.update(name.encode() + buffer.numpy().tobytes())
        model.set_submodule(name, layer)
    logger.info("%d linear layers in fp8 (%s), %s scales.", len(found), device.name, _kind(measurements))
    return digest.hexdigest()


def _linears(model: Any, exclude: Sequence[str]) -> dict[str, nn.Linear]:
    output = model.get_output_embeddings()
    output = getattr(output, "local", output)
    return {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear
        and part is not output
        and not _ROUTER.search(name)
        and not any(re.search(pattern, name.removesuffix(_PART)) for pattern in exclude)
    }


def _kind(measurements: Measurements | None) -> str:
    return "dynamic" if measurements is None else "measured"
