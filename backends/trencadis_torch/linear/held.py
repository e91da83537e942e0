"""Forms in which a weight is held, between the checkpoint that it is read from and the kernel that it is packed for.

A checkpoint's format (:mod:`trencadis_torch.linear.formats`) turns what its files have into one of these, a layer at a time; what packs
layers takes any of them. None is wider than the file, unless it is said.

Shapes: N outputs, K inputs, G inputs of one group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Self, overload

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
    "JoinedWeight",
    "Matrices",
    "StackedWeight",
    "UnpackedWeight",
    "form_of",
    "with_zeros",
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

    @abstractmethod
    def unpacked(self) -> UnpackedWeight:
        """Return the same with a number in memory for each weight."""


class UnpackedWeight(HeldWeight):
    """A matrix with a number in memory for each weight.

    Attributes:
        values: The numbers, ``[N, K]``.
        BY_OUTPUT: Names of the tensors that have a row for each output.
    """

    BY_OUTPUT: ClassVar[tuple[str, ...]] = ("values", "scales")
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    def unpacked(self) -> Self:
        """Return the same."""
        return self

    def rows(self, index: slice | torch.Tensor) -> Self:
        """Return some outputs."""
        return self.changed(lambda tensor, _: tensor[index])

    def changed(self, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Self:
        """Return the same with other outputs. 8 bit floats are bytes meanwhile: PyTorch does not index, join or fill them.

        Args:
            change: Returns the new tensor for one that has a row for each output, and its name.
        """
        made = {name: change(self.bytes_of(name), name).view(getattr(self, name).dtype) for name in self.BY_OUTPUT}
        return attrs.evolve(self, **made)  # type: ignore[misc] # every form is a class of attrs

    def bytes_of(self, name: str) -> torch.Tensor:
        """Return a tensor by its name, 8 bit floats as bytes."""
        tensor: torch.Tensor = getattr(self, name)
        return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


@attrs.frozen(eq=False)
class FloatWeight(UnpackedWeight):
    """Floats as stored.

    Attributes:
        values: float32, bfloat16 or float16 ``[N, K]``.
        rounds_rows: Whether rows are rounded to bfloat16 too before they are multiplied.
    """

    BY_OUTPUT = ("values",)
    values: torch.Tensor
    rounds_rows: bool = False

    @property
    def form(self) -> str:
        """The dtype's name, and whether rows are rounded to it."""
        return str(self.values.dtype).removeprefix("torch.") + (", rows too" if self.rounds_rows else "")

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self.values.float()

    def columns(self, index: slice) -> FloatWeight:
        """Return a range of inputs."""
        return attrs.evolve(self, values=self.values[:, index])


@attrs.frozen(eq=False)
class Float8Weight(UnpackedWeight):
    """Floats of 8 bits with a scale for each group of inputs: ``weight = scale · value``.

    Attributes:
        values: One of :data:`FLOAT8`, ``[N, K]``.
        scales: float32 ``[N, K / G]``.
    """

    values: torch.Tensor
    scales: torch.Tensor

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

    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs. Where a group is cut, all groups become smaller, or floats if they would be smaller than 16."""
        cut = _cut(index, self.shape[1], self.group)
        if cut is None:
            return FloatWeight(self.dequantised()[:, index])
        times, groups = cut
        return Float8Weight(self.values[:, index], self.scales.repeat_interleave(times, 1)[:, groups])


@attrs.frozen(eq=False)
class ChannelWeight(UnpackedWeight):
    """int8 with one scale for each output: ``weight = scale · value``.

    Attributes:
        values: int8 ``[N, K]``.
        scales: float32 ``[N]``.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def form(self) -> str:
        """The form in words."""
        return "int8"

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self.values.float() * self.scales[:, None]

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


@attrs.frozen(eq=False)
class GroupedWeight(UnpackedWeight, IntegerGroups):
    """Unsigned integers with a scale and a minimum for each group of inputs: ``weight = scale · value + minimum``.

    With a table ``weight = scale · levels[value] + minimum``; with an order ``weight[n, order[k]]`` is made of ``value[n, k]``.

    Attributes:
        values: uint8 ``[N, K]``, one value a byte, below ``2 ** bits``.
        scales: float32 ``[N, K / G]``.
        minimums: float32 ``[N, K / G]``.
        bits: 4 or 8, of a value as it is packed.
        levels: See :class:`IntegerGroups`, like ``order``.
        order: See ``levels``.
    """

    BY_OUTPUT = ("values", "scales", "minimums")
    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int
    levels: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """G."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        values = self.values if self.levels is None else self.levels[self.values.int()]
        grouped = values.float().reshape(len(values), -1, self.group)
        columns = (grouped * self.scales[..., None] + self.minimums[..., None]).flatten(1)
        return columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)

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
        bits: Size of a value.
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


@attrs.frozen(eq=False)
class JoinedWeight(HeldWeight):
    """Matrices with the same inputs as one, each in its own form; nothing is copied before it is asked for.

    Attributes:
        parts: The matrices.
        in_turn: Their outputs take turns, those of the first before those of the next; else one matrix follows the other.
    """

    parts: Sequence[HeldWeight]
    in_turn: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def form(self) -> str:
        """That of all parts; float32 where they differ."""
        forms = {part.form for part in self.parts}
        return forms.pop() if len(forms) == 1 else FloatWeight(torch.empty(0, 0)).form

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self._joined([part.dequantised() for part in self.parts])

    def rows(self, index: slice | torch.Tensor) -> HeldWeight:
        """Return some outputs; parts keep their forms where these outputs lie among each other as all do."""
        counts = [part.shape[0] for part in self.parts]
        places = self._joined([torch.stack([torch.full((n,), at), torch.arange(n)], 1) for at, n in enumerate(counts)])[
            index
        ]
        own = [places[places[:, 0] == at] for at in range(len(counts))]
        left = [one for one in own if len(one)]
        if (self.in_turn and len(set(map(len, left))) > 1) or not torch.equal(self._joined(left), places):
            return self.unpacked().rows(index)
        kept = [part.rows(_as_slice(one[:, 1])) for part, one in zip(self.parts, own, strict=True) if len(one)]
        return kept[0] if len(kept) == 1 else attrs.evolve(self, parts=kept)

    def columns(self, index: slice) -> JoinedWeight:
        """Return a range of inputs."""
        return attrs.evolve(self, parts=[part.columns(index) for part in self.parts])

    def unpacked(self) -> UnpackedWeight:
        """Return one matrix with a number in memory for each weight; as float32 where forms differ."""
        plain = [one.unpacked() for one in self.parts]
        if not all(_is_alike(plain[0], one) for one in plain):
            return FloatWeight(self.dequantised())
        return plain[0].changed(lambda _, name: self._joined([one.bytes_of(name) for one in plain]))

    def _joined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors, 1).flatten(0, 1) if self.in_turn else torch.cat(tensors)


def _as_slice(index: torch.Tensor) -> slice | torch.Tensor:
    """Return ascending numbers as a range where none is left out, so that what it takes is a view."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index


def with_zeros(weight: HeldWeight, missing: int) -> HeldWeight:
    """Return a copy of a matrix with some more outputs, all of them 0. Pure."""

    def copied(tensor: torch.Tensor, _: str) -> torch.Tensor:
        made = tensor.new_zeros((len(tensor) + missing, *tensor.shape[1:]))
        made[: len(tensor)] = tensor
        return made

    return weight.unpacked().changed(copied)


def _is_alike(one: HeldWeight, other: HeldWeight) -> bool:
    """Return whether outputs of both may be in one matrix."""
    if type(one) is not type(other) or one.form != other.form:
        return False
    pairs = [(getattr(one, name, None), getattr(other, name, None)) for name in ("levels", "order")]
    return all(mine is None or (yours is not None and torch.equal(mine, yours)) for mine, yours in pairs)


@attrs.frozen
class Matrices(Sequence[HeldWeight]):
    """Matrices that are read as they are asked for, and not held here.

    Attributes:
        readers: Each reads one.
    """

    readers: Sequence[Callable[[], HeldWeight]]

    def __len__(self) -> int:
        return len(self.readers)

    @overload
    def __getitem__(self, index: int) -> HeldWeight: ...
    @overload
    def __getitem__(self, index: slice) -> Matrices: ...
    def __getitem__(self, index: int | slice) -> HeldWeight | Matrices:
        return Matrices(self.readers[index]) if isinstance(index, slice) else self.readers[index]()


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
        plain = matrix.unpacked()
        values = plain.values if isinstance(plain, FloatWeight) else plain.dequantised()
        return FloatWeight(values.T.contiguous())

    def held(self, hold: Callable[[HeldWeight], HeldWeight], *, transposed: bool) -> StackedWeight:
        """Return the same in another form.

        Args:
            hold: Makes it of an expert's matrix ``[N, K]``.
            transposed: The model has them as ``[K, N]``.
        """
        count = range(len(self.matrices))
        return StackedWeight([hold(self.turned(e, transposed=transposed)) for e in count], flipped=transposed)
