"""Forms in which a weight is held, between the checkpoint that it is read from and the kernel that it is packed for.

A checkpoint's format (:mod:`trencadis_torch.linear.formats`) turns what its files have into one of these, a layer at a time; what packs
layers takes any of them. None is wider than the file, unless it is said.

Shapes: N outputs, K inputs, G inputs of one group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import attrs
import torch

__all__ = ["ChannelWeight", "FloatWeight", "GroupedWeight", "HeldWeight", "StackedWeight", "side_by_side"]


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

    @property
    def form(self) -> str:
        """The form in words."""
        return f"int{self.bits} in groups of {self.group}"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        grouped = self.values.float().reshape(len(self.values), -1, self.group)
        return (grouped * self.scales[..., None] + self.minimums[..., None]).flatten(1)

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        """Return some outputs."""
        return attrs.evolve(self, values=self.values[index], scales=self.scales[index], minimums=self.minimums[index])


def side_by_side(weights: Sequence[HeldWeight]) -> HeldWeight:
    """Return matrices with the same inputs as one, their outputs one after the other; as float32 where their forms differ. Pure."""
    if len(weights) == 1:
        return weights[0]
    floats = [one for one in weights if isinstance(one, FloatWeight)]
    if len(floats) == len(weights) and len({one.values.dtype for one in floats}) == 1:
        return FloatWeight(torch.cat([one.values for one in floats]))
    channels = [one for one in weights if isinstance(one, ChannelWeight)]
    if len(channels) == len(weights):
        return ChannelWeight(torch.cat([one.values for one in channels]), torch.cat([one.scales for one in channels]))
    groups = [one for one in weights if isinstance(one, GroupedWeight)]
    if len(groups) == len(weights) and len({(one.bits, one.group) for one in groups}) == 1:
        values, scales, minimums = (
            torch.cat([getattr(one, name) for one in groups]) for name in ("values", "scales", "minimums")
        )
        return GroupedWeight(values, scales, minimums, groups[0].bits)
    return FloatWeight(torch.cat([one.dequantised() for one in weights]))


@attrs.frozen(eq=False)
class StackedWeight:
    """Matrices of a layer's experts, which a model has as one weight of three dimensions, ``[E, A, B]``.

    Attributes:
        matrices: A matrix of each expert.
        flipped: Each is ``[B, A]``, the model's transposed; else ``[A, B]``.
    """

    matrices: Sequence[HeldWeight]
    flipped: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, A and B."""
        first, second = self.matrices[0].shape
        return (len(self.matrices), second, first) if self.flipped else (len(self.matrices), first, second)

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        """Return an expert's matrix as the model has it, float32 ``[A, B]``, dequantised as it is asked for."""
        matrix = self.matrices[int(expert)].dequantised()
        return matrix.T if self.flipped else matrix

    def turned(self, expert: int, *, transposed: bool) -> HeldWeight:
        """Return an expert's matrix ``[N, K]``; of one that is quantised along its outputs the floats that it stands for.

        Args:
            expert: Which.
            transposed: The model has it as ``[K, N]``.
        """
        matrix = self.matrices[expert]
        if transposed is self.flipped:
            return matrix
        values = matrix.values if isinstance(matrix, FloatWeight) else matrix.dequantised()
        return FloatWeight(values.T.contiguous())

    def held(self, hold: Callable[[HeldWeight], HeldWeight], *, transposed: bool) -> StackedWeight:
        """Return the same in another form.

        Args:
            hold: Makes it of an expert's matrix ``[N, K]``.
            transposed: The model has them as ``[K, N]``.
        """
        count = range(len(self.matrices))
        return StackedWeight([hold(self.turned(e, transposed=transposed)) for e in count], flipped=transposed)
