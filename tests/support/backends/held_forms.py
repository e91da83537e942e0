"""A matrix in each form in which weights are held."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from trencadis_torch.linear.held import FloatWeight, GroupedWeight, HeldWeight
from trencadis_torch.linear.packed import quantise, quantise_groups

__all__ = ["FORMS"]


def in_groups(weight: torch.Tensor, *, bits: int, group: int) -> GroupedWeight:
    """Return a weight rounded to nearest between the least and the largest value of each group; float16 holds scales and minimums."""
    group = math.gcd(group, weight.shape[1])
    grouped = weight.detach().float().unflatten(1, (-1, group))
    minimums = grouped.amin(2).half().float()
    scales = ((grouped.amax(2) - minimums) / (2**bits - 1)).half().float()
    values = (grouped - minimums[..., None]) / scales.clamp_min(1e-6)[..., None]
    return GroupedWeight(values.round().clamp(0, 2**bits - 1).flatten(1).byte(), scales, minimums, bits)


FORMS: dict[str, Callable[[torch.Tensor], HeldWeight]] = {
    "float32": FloatWeight,
    "bfloat16": lambda weight: FloatWeight(weight.bfloat16()),
    "int8": quantise,
    "int4": lambda weight: quantise_groups(weight, math.gcd(32, weight.shape[1])),
    "int4-minimums-16": lambda weight: in_groups(weight, bits=4, group=16),
    "int4-minimums-128": lambda weight: in_groups(weight, bits=4, group=128),
    "int8-minimums-32": lambda weight: in_groups(weight, bits=8, group=32),
    "int8-one-group": lambda weight: in_groups(weight, bits=8, group=weight.shape[1]),
}
"""Makes of a matrix ``[N, K]``, by name."""
