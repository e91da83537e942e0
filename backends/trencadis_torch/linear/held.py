"""Forms in which a weight is held, between the checkpoint that it is read from and the kernel that it is packed for.

A checkpoint's format (:mod:`trencadis_torch.linear.formats`) turns what its files have into one of these, a layer at a time; what packs
layers takes any of them. None is wider than the file, unless it is said.

Shapes: N outputs, K inputs, G inputs of one group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import attrs
import torch

__all__ = ["FLOAT8", "ChannelWeight", "Float8Weight", "FloatWeight", "GroupedWeight", "HeldWeight", "LevelWeight"]

FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Floats of 8 bits that kernels widen."""


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
        grouped = self.values.float().unflatten(1, (-1, self.group))
        return (grouped * self.scales[..., None]).flatten(1)

    def rows(self, index: slice | torch.Tensor) -> Float8Weight:
        """Return some outputs."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)  # not all indexing is there for float8
        return Float8Weight(values, self.scales[index])


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


@attrs.frozen(eq=False)
class GroupedWeight(HeldWeight):
    """Unsigned integers with a scale and a minimum for each group of inputs: ``weight = scale · value + minimum``.

    Attributes:
        values: uint8 ``[N, K]``, one value a byte, below ``2 ** bits``.
        scales: float32 ``[N, K / G]``.
        minimums: float32 ``[N, K / G]``.
        bits: 4 or 8, of a value as it is packed.
        order: Input of each column of the values, int64 ``[K]``, where groups are of inputs that lie apart; None: columns are inputs.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int
    order: torch.Tensor | None = None

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
        """The form in words."""
        return f"int{self.bits} in groups of {self.group}{'' if self.order is None else ', act-order'}"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        grouped = self.values.float().reshape(len(self.values), -1, self.group)
        columns = (grouped * self.scales[..., None] + self.minimums[..., None]).flatten(1)
        return columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        """Return some outputs."""
        return attrs.evolve(self, values=self.values[index], scales=self.scales[index], minimums=self.minimums[index])


@attrs.frozen(eq=False)
class LevelWeight(HeldWeight):
    """Places in a table of 16 integers, with a scale for each group of inputs: ``weight = scale · levels[value]``.

    Attributes:
        values: uint8 ``[N, K]``, one value a byte, below 16.
        scales: float32 ``[N, K / G]``.
        levels: int8 ``[16]``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor

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
        """The form in words."""
        return f"4 bit levels in groups of {self.group}"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        grouped = self.levels.float()[self.values.int()].unflatten(1, (-1, self.group))
        return (grouped * self.scales[..., None]).flatten(1)

    def rows(self, index: slice | torch.Tensor) -> LevelWeight:
        """Return some outputs."""
        return attrs.evolve(self, values=self.values[index], scales=self.scales[index])
