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

__all__ = ["ChannelWeight", "FloatWeight", "GroupedWeight", "HeldWeight", "IntegerGroups"]


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
    """

    bits: int

    @property
    @abstractmethod
    def group(self) -> int:
        """G."""

    @property
    def form(self) -> str:
        """The form in words."""
        return f"int{self.bits} in groups of {self.group}"

    @abstractmethod
    def unpacked(self) -> GroupedWeight:
        """Return the values, a byte each, in memory."""


@attrs.frozen(eq=False)
class GroupedWeight(IntegerGroups):
    """Unsigned integers with a scale and a minimum for each group of inputs: ``weight = scale · value + minimum``.

    Attributes:
        values: uint8 ``[N, K]``, one value a byte, below ``2 ** bits``.
        scales: float32 ``[N, K / G]``.
        minimums: float32 ``[N, K / G]``.
        bits: 4 or 8, of a value as it is packed.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int

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
        grouped = self.values.float().reshape(len(self.values), -1, self.group)
        return (grouped * self.scales[..., None] + self.minimums[..., None]).flatten(1)

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        """Return some outputs."""
        return attrs.evolve(self, values=self.values[index], scales=self.scales[index], minimums=self.minimums[index])

    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs. Where a group is cut, all groups become smaller, or floats if they would be smaller than 16."""
        first, last, _ = index.indices(self.values.shape[1])
        group = math.gcd(self.group, first, last)
        if group < min(self.group, SMALLEST_GROUP):
            return FloatWeight(self.dequantised()[:, index])
        groups = slice(first // group, last // group)
        return attrs.evolve(
            self,
            values=self.values[:, index],
            scales=self.scales.repeat_interleave(self.group // group, 1)[:, groups],
            minimums=self.minimums.repeat_interleave(self.group // group, 1)[:, groups],
        )
