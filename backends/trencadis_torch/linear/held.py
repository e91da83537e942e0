"""Forms in which a weight is held, between the checkpoint that it is read from and the kernel that it is packed for.

A checkpoint's format (:mod:`trencadis_torch.linear.formats`) turns what its files have into one of these, a layer at a time; what packs
layers takes any of them. None is wider than the file, unless it is said.

Shapes: N outputs, K inputs, G inputs of one group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

import attrs
import torch

__all__ = [
    "FLOAT8",
    "SMALLEST_GROUP",
    "ChannelWeight",
    "Float8Weight",
    "FloatWeight",
    "GroupedWeight",
    "HeldWeight",
    "IntegerGroups",
    "form_of",
]

FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Floats of 8 bits that kernels widen."""

SMALLEST_GROUP: Final = 16
"""Inputs of the smallest group that cutting inputs leaves: the smallest of any format that is read."""


class HeldWeight(ABC):
    """A matrix ``[N, K]`` in one of the forms that kernels multiply by."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """N and K."""

    @property
    @abstractmethod
    def form(self) -> str:
        """The form in words, such as ``int4 in groups of 32``."""

    @abstractmethod
    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""

    @abstractmethod
    def rows(self, index: slice | torch.Tensor) -> HeldWeight:
        """Return some outputs; a view where there can be one."""

    @abstractmethod
    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs, with the same values; a view where there can be one."""


@attrs.frozen(eq=False)
class FloatWeight(HeldWeight):
    """Floats as stored.

    Attributes:
        values: float32, bfloat16 or float16 ``[N, K]``.
    """

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def form(self) -> str:
        """The dtype's name."""
        return str(self.values.dtype).removeprefix("torch.")

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self.values.float()

    def rows(self, index: slice | torch.Tensor) -> FloatWeight:
        """Return some outputs."""
        return FloatWeight(self.values[index])

    def columns(self, index: slice) -> FloatWeight:
        """Return a range of inputs."""
        return FloatWeight(self.values[:, index])


@attrs.frozen(eq=False)
class Float8Weight(HeldWeight):
    """Floats of 8 bits with a scale for each group of inputs: ``weight = scale · value``.

    Attributes:
        values: One of :data:`FLOAT8`, ``[N, K]``.
        scales: float32 ``[N, K / G]``.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group(self) -> int:
        """G."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def form(self) -> str:
        """The dtype's name, with its groups where there are several."""
        groups = f" in groups of {self.group}" if self.scales.shape[1] > 1 else ""
        return f"{str(self.values.dtype).removeprefix('torch.')}{groups}"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        grouped = self.values.float().reshape(len(self.values), -1, self.group)
        return (grouped * self.scales[..., None]).flatten(1)

    def rows(self, index: slice | torch.Tensor) -> Float8Weight:
        """Return some outputs."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)  # not all indexing is there for float8
        return Float8Weight(values, self.scales[index])

    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs. Where a group is cut, all groups become smaller, or floats if they would be smaller than 16."""
        cut = _cut(index, self.shape[1], self.group)
        if cut is None:
            return FloatWeight(self.dequantised()[:, index])
        times, groups = cut
        return Float8Weight(self.values[:, index], self.scales.repeat_interleave(times, 1)[:, groups])


@attrs.frozen(eq=False)
class ChannelWeight(HeldWeight):
    """int8 with one scale for each output: ``weight = scale · value``.

    Attributes:
        values: int8 ``[N, K]``.
        scales: float32 ``[N]``.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def form(self) -> str:
        """The form in words."""
        return "int8"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self.values.float() * self.scales[:, None]

    def rows(self, index: slice | torch.Tensor) -> ChannelWeight:
        """Return some outputs."""
        return ChannelWeight(self.values[index], self.scales[index])

    def columns(self, index: slice) -> ChannelWeight:
        """Return a range of inputs, with the scales of all."""
        return ChannelWeight(self.values[:, index], self.scales)


class IntegerGroups(HeldWeight):
    """Unsigned integers with a scale and a minimum for each group of inputs, in memory or where they are stored.

    Attributes:
        bits: 4 or 8, of a value as it is packed.
        levels: Table in which values are places, uint8 ``[16]``; None: values are integers themselves.
        order: Input of each column of the values, int64 ``[K]``, where groups are of inputs that lie apart; None: columns are inputs.
    """

    bits: int
    levels: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    @abstractmethod
    def group(self) -> int:
        """G."""

    @property
    def form(self) -> str:
        """The form in words."""
        return form_of(self.bits, self.group, has_levels=self.levels is not None, has_order=self.order is not None)

    @abstractmethod
    def unpacked(self) -> GroupedWeight:
        """Return the values, a byte each, in memory."""


@attrs.frozen(eq=False)
class GroupedWeight(IntegerGroups):
    """Unsigned integers with a scale and a minimum for each group of inputs: ``weight = scale · value + minimum``.

    With a table ``weight = scale · levels[value] + minimum``; with an order ``weight[n, order[k]]`` is made of ``value[n, k]``.

    Attributes:
        values: uint8 ``[N, K]``, one value a byte, below ``2 ** bits``.
        scales: float32 ``[N, K / G]``.
        minimums: float32 ``[N, K / G]``.
        bits: 4 or 8, of a value as it is packed.
        levels: As of :class:`IntegerGroups`.
        order: As of :class:`IntegerGroups`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int
    levels: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group(self) -> int:
        """G."""
        return self.values.shape[1] // self.scales.shape[1]

    def unpacked(self) -> GroupedWeight:
        """Return the same."""
        return self

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        values = self.values if self.levels is None else self.levels[self.values.int()]
        grouped = values.float().reshape(len(values), -1, self.group)
        columns = (grouped * self.scales[..., None] + self.minimums[..., None]).flatten(1)
        return columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        """Return some outputs."""
        return attrs.evolve(self, values=self.values[index], scales=self.scales[index], minimums=self.minimums[index])

    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs. Where a group is cut, all groups become smaller, or floats if they would be smaller than 16."""
        cut = None if self.order is not None else _cut(index, self.shape[1], self.group)
        if cut is None:
            floats = self.dequantised()[:, index]
            return FloatWeight(floats if self.order is None else floats.bfloat16())
        times, groups = cut
        scales, minimums = (one.repeat_interleave(times, 1)[:, groups] for one in (self.scales, self.minimums))
        return attrs.evolve(self, values=self.values[:, index], scales=scales, minimums=minimums)


def form_of(bits: int, group: int, *, has_levels: bool, has_order: bool) -> str:
    """Return the form of integers in groups in words, such as ``int4 in groups of 32``. Pure.

    Args:
        bits: Of a value.
        group: Inputs that share a scale.
        has_levels: Values are places in a table.
        has_order: Groups are of inputs that lie apart.
    """
    kind = f"{bits} bit levels" if has_levels else f"int{bits}"
    return f"{kind} in groups of {group}{', act-order' if has_order else ''}"


def _cut(index: slice, num_inputs: int, group: int) -> tuple[int, slice] | None:
    """Return into how many each group is cut, and which of the smaller ones are in a range of inputs; None: they would be too small."""
    first, last, _ = index.indices(num_inputs)
    smaller = math.gcd(group, first, last)
    if smaller < min(group, SMALLEST_GROUP):
        return None
    return group // smaller, slice(first // smaller, last // smaller)
