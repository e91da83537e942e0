"""A matrix in each form in which weights are held."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from trencadis_torch.linear.held import Float8Weight, FloatWeight, GroupedWeight, HeldWeight
from trencadis_torch.linear.packed import quantise, quantise_groups


def in_groups(weight: torch.Tensor, *, bits: int, group: int) -> GroupedWeight:
    """Return a weight rounded to nearest between the least and the largest value of each group; float16 holds scales and minimums."""
    group = math.gcd(group, weight.shape[1])
    grouped = weight.detach().float().unflatten(1, (-1, group))
    minimums = grouped.amin(2).half().float()
    scales = ((grouped.amax(2) - minimums) / (2**bits - 1)).half().float()
    values = (grouped - minimums[..., None]) / scales.clamp_min(1e-6)[..., None]
    return GroupedWeight(values.round().clamp(0, 2**bits - 1).flatten(1).byte(), scales, minimums, bits)


def in_levels(weight: torch.Tensor, *, group: int) -> GroupedWeight:
    """Return a weight as the nearest of 16 levels that lie unevenly, as those of IQ4_NL do."""
    levels = torch.tensor((0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240), dtype=torch.uint8)
    group = math.gcd(group, weight.shape[1])
    grouped = weight.detach().float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / 112).half().float()
    wanted = grouped / scales.clamp_min(1e-6)[..., None] + 127
    values = (wanted[..., None] - levels.float()).abs().argmin(-1).flatten(1).byte()
    return GroupedWeight(values, scales, -127 * scales, 4, levels)


def in_float8(weight: torch.Tensor, dtype: torch.dtype, *, group: int) -> Float8Weight:
    """Return a weight rounded to 8 bit floats, the largest magnitude of a group at their end; float16 holds the scales."""
    group = math.gcd(group, weight.shape[1])
    grouped = weight.detach().float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / torch.finfo(dtype).max).clamp_min(2.0**-14).half().float()
    most = torch.finfo(dtype).max
    return Float8Weight((grouped / scales[..., None]).clamp(-most, most).to(dtype).flatten(1), scales)


def in_scattered_groups(weight: torch.Tensor, *, bits: int, group: int) -> GroupedWeight:
    """Return a weight in groups of inputs that lie apart, in an order that depends on their number alone."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return attrs.evolve(in_groups(weight[:, order], bits=bits, group=group), order=order)


FORMS: dict[str, Callable[[torch.Tensor], HeldWeight]] = {
    "float32": FloatWeight,
    "bfloat16": lambda weight: FloatWeight(weight.bfloat16()),
    "bfloat16-rows-too": lambda weight: FloatWeight(weight.bfloat16(), rounds_rows=True),
    "int8": quantise,
    "int4": lambda weight: quantise_groups(weight, math.gcd(32, weight.shape[1])),
    "int4-minimums-16": lambda weight: in_groups(weight, bits=4, group=16),
    "int4-minimums-128": lambda weight: in_groups(weight, bits=4, group=128),
    "int8-minimums-32": lambda weight: in_groups(weight, bits=8, group=32),
    "int4-scattered-32": lambda weight: in_scattered_groups(weight, bits=4, group=32),
    "int8-scattered-16": lambda weight: in_scattered_groups(weight, bits=8, group=16),
    "levels4-32": lambda weight: in_levels(weight, group=32),
    "e4m3-32": lambda weight: in_float8(weight, torch.float8_e4m3fn, group=32),
    "e5m2-one-group": lambda weight: in_float8(weight, torch.float8_e5m2, group=weight.shape[1]),
    "int8-one-group": lambda weight: in_groups(weight, bits=8, group=weight.shape[1]),
}
"""Makes of a matrix ``[N, K]``, by name."""
