"""The form in which a model's matrices are held, and how what is held is packed."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import nn

from trencadis_torch.linear.held import ChannelWeight, FloatWeight, HeldWeight
from trencadis_torch.linear.native import Native
from trencadis_torch.linear.packed import BlockedLinear, FusedLinear, Int8Linear, PackedLinear, quantise

__all__ = ["Holding", "pack"]

FLOAT32: Final = "float32"
INT8: Final = "int8"


@attrs.frozen
class Holding:
    """The form in which matrices are held.

    Attributes:
        form: ``float32`` or ``int8``; a checkpoint that is quantised keeps its own form under ``float32``.
    """

    form: str = FLOAT32

    def hold(self, weight: HeldWeight) -> HeldWeight:
        """Return a matrix in the form that is held; one that a checkpoint has rounded stays as it is."""
        if not isinstance(weight, FloatWeight):
            return weight
        if self.form == INT8:
            return ChannelWeight(*quantise(weight.values))
        return FloatWeight(weight.values.float())


def pack(weights: list[HeldWeight], biases: list[torch.Tensor | None], native: Native | None) -> FusedLinear:
    """Return one packed layer for matrices that have the same input.

    Args:
        weights: Held.
        biases: Of each, float32 ``[N]``.
        native: The compiled library; None: oneDNN packs float32.
    """
    layers = [_layer(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if native is None:
        return BlockedLinear(layers)
    if all(isinstance(weight, ChannelWeight) for weight in weights):
        return Int8Linear(layers, native)
    return PackedLinear(layers, native)


def _layer(weight: HeldWeight, bias: torch.Tensor | None) -> nn.Linear:
    num_outputs, num_inputs = weight.shape
    layer = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.dequantised(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
