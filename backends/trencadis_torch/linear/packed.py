"""Linear layers whose weights are packed once, and embeddings that read their rows out of packed weights.

    HeldWeight of each layer ─▶ pack ─┬▶ PackedLinear   by linear.cpp, in the form held: a row's bits depend on that row alone
                                      └▶ BlockedLinear  float32, by oneDNN through torch, where there is no compiler: low bits may depend
                                                        on how many rows there are

Floats of any width are multiplied in float32, by rows as they are unless these are to be rounded to bfloat16. Where weights are integers, rows are rounded to int8 with a scale for each group of inputs,
and the sums of a group are exact.

Shapes: N outputs, K inputs, G inputs of one group.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import attrs
import torch
from torch import nn

from trencadis_torch.linear.held import (
    ChannelWeight,
    Float8Weight,
    FloatWeight,
    GroupedWeight,
    HeldWeight,
    IntegerGroups,
    form_of,
)
from trencadis_torch.linear.native import Native, Packed

__all__ = [
    "BlockedLinear",
    "FusedLinear",
    "PackedLinear",
    "RowsEmbedding",
    "held_of",
    "pack",
    "quantise",
    "quantise_groups",
]

AT_ONCE: Final = 1 << 18
"""Weights that are rounded at a time."""

PIECE: Final = 1 << 22
"""Weights in groups that are packed at a time."""

INT4_GROUP: Final = 32
"""Inputs that share a scale, where this engine rounds to 4 bits."""

MOST_GROUP: Final = 65_536
"""Inputs of one group whose sum fits into 32 bits: 255 · 127 each."""


class FusedLinear(nn.Module):
    """One linear layer in place of one or several that have the same input: their outputs stand side by side.

    Args:
        shape: N of all together, and K.

    Attributes:
        in_features: K.
        out_features: N.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.out_features, self.in_features = shape

    @property
    @abstractmethod
    def form(self) -> str:
        """The form of the weights in words."""

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """Memory of the weights."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from ``[..., K]``."""


class PackedLinear(FusedLinear):
    """Weights in panels of the library.

    Args:
        packed: They.
        form: In words.
        native: The library.
    """

    def __init__(self, packed: Packed, form: str, native: Native) -> None:
        super().__init__((packed.num_outputs, packed.num_inputs))
        self.packed = packed
        self._form = form
        self._native = native

    @property
    def form(self) -> str:
        """The form of the weights in words."""
        return self._form

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights, with scales and biases."""
        return sum(part.nbytes for part in self.packed if isinstance(part, torch.Tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from ``[..., K]``."""
        return self._native.linear(x.float(), self.packed)

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Return rows of the weights as they are held, times a scale, float32 ``[..., K]``."""
        return self._native.rows(ids, self.packed, scale)


class BlockedLinear(FusedLinear):
    """float32 weights in oneDNN's blocks.

    Args:
        weights: float32 ``[N, K]`` of each layer.
        bias: float32, of all outputs, or None.
    """

    ROWS_HINT = 32

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat([*weights])
        super().__init__((len(weight), weight.shape[1]))
        self._weights = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_HINT)  # noqa: SLF001 - as torch.compile
        self._bytes = weight.nbytes
        self._bias = bias

    @property
    def form(self) -> str:
        """The form of the weights in words."""
        return "float32"

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return self._bytes + (0 if self._bias is None else self._bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from float32 ``[..., K]``."""
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - calls it
        out: torch.Tensor = product(x, self._weights, self._bias, "none", [], "")
        return out


class RowsEmbedding(nn.Module):
    """Embeddings out of packed weights, such as those of the output projection that shared them before they were packed.

    Args:
        head: The output projection, or another packed matrix ``[N, K]``.
        scale: Factor of the embeddings.
    """

    def __init__(self, head: PackedLinear, scale: float) -> None:
        super().__init__()
        # In a tuple, for a module that is an attribute would be a part of this one as well.
        self._head = (head,)
        self.scale = scale

    @property
    def head(self) -> PackedLinear:
        """The given head."""
        return self._head[0]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., K]`` from int64 ids ``[...]``."""
        return self._head[0].rows(input_ids, self.scale)


def pack(weights: Sequence[HeldWeight], biases: Sequence[torch.Tensor | None], native: Native | None) -> FusedLinear:
    """Return one layer in place of those that have these weights and the same input, in the form in which they are held.

    Floats of different widths become float32, and so does float16, for which there is no kernel, unless bfloat16 holds all its values.
    Integers of different forms become the narrowest that holds all of their values: 8 bits, in the largest groups that fit into all.
    Integers beside floats become float32, and those of different orders of inputs bfloat16. Scales of groups are
    float16, times a float32 of each output: those of more bits are rounded, which changes a weight by at most a 2048th.

    Args:
        weights: ``[N, K]`` of each layer, the outputs side by side.
        biases: ``[N]`` of each layer, or None.
        native: The library; None: all become float32, for oneDNN.

    Raises:
        ValueError: More inputs share a scale than their sum has room for.
    """
    bias = _side_by_side_biases(weights, biases)
    if native is None:
        return BlockedLinear([weight.dequantised() for weight in weights], bias)
    if all(isinstance(weight, ChannelWeight) for weight in weights):
        _check_group(weights[0].shape[1])
        channels = [(weight.values, weight.scales) for weight in weights if isinstance(weight, ChannelWeight)]
        return PackedLinear(native.pack_channels(*channels, bias=bias), weights[0].form, native)
    if len({weight.form for weight in weights}) == 1 and isinstance(weights[0], Float8Weight):
        octets = [weight for weight in weights if isinstance(weight, Float8Weight)]
        return PackedLinear(_pack_float8(octets, bias, native), octets[0].form, native)
    pairs = [weight.values for weight in weights if isinstance(weight, FloatWeight) and weight.rounds_rows]
    if len(pairs) == len(weights):
        return PackedLinear(native.pack_floats(*pairs, bias=bias, rounds_rows=True), weights[0].form, native)
    weights = _of_one_order(weights, native.most_apart)
    if any(isinstance(weight, (FloatWeight, Float8Weight)) for weight in weights):
        floats = _of_one_width(weights)
        return PackedLinear(native.pack_floats(*floats, bias=bias), FloatWeight(floats[0]).form, native)
    return _pack_groups(weights, _one_grouping(weights), bias, native)


def held_of(layer: nn.Linear, quantization: str = "none") -> HeldWeight:
    """Return a layer's weight as it is, or rounded.

    Args:
        layer: Layer of PyTorch.
        quantization: ``none``, ``int8``, or ``int4``, which is int8 where inputs cannot be cut into groups.
    """
    weight = layer.weight.detach()
    if quantization == "none":
        return FloatWeight(weight)
    if quantization == "int4" and not weight.shape[1] % INT4_GROUP:
        return quantise_groups(weight, INT4_GROUP)
    return quantise(weight)


def quantise(weight: torch.Tensor) -> ChannelWeight:
    """Return int8 weights with the scale of each output: symmetric, to nearest. Pure."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for part, into, scale in _a_few_rows(weight.detach(), rounded, scales):
        plain = part.float()
        torch.div(plain.abs().amax(1), 127, out=scale)
        into.copy_((plain / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())
    return ChannelWeight(rounded, scales)


def quantise_groups(weight: torch.Tensor, group: int) -> GroupedWeight:
    """Return weights of 4 bits with a scale for each group: values from -8 to 7, the largest magnitude being -8, to nearest. Pure.

    Args:
        weight: ``[N, K]``.
        group: Inputs that share a scale; K is a multiple.

    Source: llama.cpp, ``quantize_row_q4_0_ref``.
    """
    num_groups = weight.shape[1] // group
    rounded, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight), num_groups)
    for part, into, scale in _a_few_rows(weight.detach(), rounded, scales):
        plain = part.float().reshape(len(part), num_groups, group)
        largest = plain.gather(2, plain.abs().argmax(2, keepdim=True))
        torch.div(largest[..., 0], -8, out=scale)
        factor = torch.where(largest == 0, 0, -8 / largest)
        into.copy_((plain * factor).round_().add_(8).clamp_(0, 15).flatten(1))
    return GroupedWeight(rounded, scales, -8 * scales, 4)


def _a_few_rows(weight: torch.Tensor, *into: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    """Cut tensors into a few rows at a time: what lies between stays in the processor's caches."""
    num_rows = max(1, AT_ONCE // weight.shape[1])
    return zip(*(torch.split(tensor, num_rows) for tensor in (weight, *into)), strict=True)


def _of_one_width(weights: Sequence[HeldWeight]) -> list[torch.Tensor]:
    """Return all as bfloat16 if that holds every value, else as float32."""
    narrow = [weight.values for weight in weights if isinstance(weight, FloatWeight)]
    if len(narrow) == len(weights) and all(_fits_bfloat16(values) for values in narrow):
        return [values.bfloat16() for values in narrow]
    return [weight.dequantised() for weight in weights]


def _fits_bfloat16(values: torch.Tensor) -> bool:
    if values.dtype is torch.bfloat16:
        return True
    return values.dtype is torch.float16 and bool((values.bfloat16().float() == values.float()).all())


def _of_one_order(weights: Sequence[HeldWeight], most_apart: int) -> Sequence[HeldWeight]:
    """Return all as they are if rows can be put in order for all of them at once; else those with an order of inputs as bfloat16."""
    orders = [weight.order if isinstance(weight, IntegerGroups) else None for weight in weights]
    found = [order for order in orders if order is not None]
    is_small = all(weight.group <= most_apart for weight in weights if isinstance(weight, IntegerGroups))
    if not found or (len(found) == len(orders) and is_small and all(torch.equal(order, found[0]) for order in found)):
        return weights
    return [
        weight if order is None else FloatWeight(weight.dequantised().bfloat16())
        for weight, order in zip(weights, orders, strict=True)
    ]


class _Grouping(NamedTuple):
    """Form that integers of several layers share.

    Attributes:
        bits: Size of a value as it is packed.
        group: Inputs that share a scale.
        levels: Table in which values are places, or None.
        order: Input of each column, or None.
    """

    bits: int
    group: int
    levels: torch.Tensor | None
    order: torch.Tensor | None

    @property
    def form(self) -> str:
        """The form in words."""
        return form_of(self.bits, self.group, has_levels=self.levels is not None, has_order=self.order is not None)


def _one_grouping(weights: Sequence[HeldWeight]) -> _Grouping:
    """Return the narrowest form and the largest groups that all may have, the values as they are; they have one order of inputs."""
    integers = [weight for weight in weights if isinstance(weight, IntegerGroups)]
    tables = [weight.levels for weight in integers if weight.levels is not None]
    same = len(tables) == len(weights) and all(torch.equal(table, tables[0]) for table in tables)
    is_wide = len(integers) < len(weights) or (bool(tables) and not same)
    bits = 8 if is_wide else max(weight.bits for weight in integers)
    group = math.gcd(*(weight.group if isinstance(weight, IntegerGroups) else weight.shape[1] for weight in weights))
    _check_group(group)
    return _Grouping(bits, group, tables[0] if same else None, integers[0].order if integers else None)


def _in_groups(weight: HeldWeight, common: _Grouping) -> GroupedWeight:
    """Return a weight in groups of so many inputs, which divide its own."""
    if isinstance(weight, ChannelWeight):
        scales = weight.scales[:, None]
        found = GroupedWeight(weight.values.view(torch.uint8) ^ 128, scales, -128 * scales, 8)
    else:
        unpacked = weight.unpacked()
        assert isinstance(unpacked, GroupedWeight), "floats are packed as such"
        found = unpacked
    times = found.group // common.group
    scales, minimums = (one.repeat_interleave(times, 1) for one in (found.scales, found.minimums))
    values = found.values
    if found.levels is not None and common.levels is None:
        values = found.levels[values.int()]
    return attrs.evolve(found, values=values, scales=scales, minimums=minimums, levels=common.levels)


def _check_group(group: int) -> None:
    if group > MOST_GROUP:
        raise ValueError(f"{group} inputs share a scale: at most {MOST_GROUP} can")


def _pack_groups(
    weights: Sequence[HeldWeight], common: _Grouping, bias: torch.Tensor | None, native: Native
) -> PackedLinear:
    """Pack some outputs at a time. Matrices in blocks are unpacked twice: for what all have in common, and to be packed."""
    num_inputs = weights[0].shape[1]
    step = max(1, PIECE // (num_inputs * native.panel)) * native.panel

    def pieces() -> Iterator[GroupedWeight]:
        for weight in weights:
            for first in range(0, weight.shape[0], step):
                yield _in_groups(weight.rows(slice(first, first + step)), common)

    zeros: set[int] = set()
    outputs = []
    for piece in pieces():
        found = _zero_of(piece)
        zeros |= set() if found is None else {found}
        outputs.append(_output_scales(piece.scales, piece.minimums))
    zero = zeros.pop() if len(zeros) == 1 else -1 if zeros else 0
    if common.levels is not None and zero < 0:  # the kernel of tables has no minimums
        return _pack_groups(weights, common._replace(bits=8, levels=None), bias, native)

    def parts() -> Iterator[tuple[torch.Tensor, ...]]:
        for piece, output in zip(pieces(), outputs, strict=True):
            kept = (piece.scales,) if zero >= 0 else (piece.scales, piece.minimums)
            yield piece.values, *((part / output[:, None]).half() for part in kept)

    packed = native.pack_groups(
        parts(),
        num_inputs=num_inputs,
        kind="levels4" if common.levels is not None else f"groups{common.bits}",
        group=common.group,
        zero=zero,
        scales=torch.cat(outputs),
        bias=bias,
        levels=common.levels,
        order=None if common.order is None else common.order.int(),
    )
    return PackedLinear(packed, common.form, native)


def _pack_float8(weights: list[Float8Weight], bias: torch.Tensor | None, native: Native) -> Packed:
    """Return packed floats of 8 bits: the kernel's value of an e4m3 float is a 256th of it, which the scales of the outputs make good."""
    dtype = weights[0].values.dtype
    outputs = [_output_scales(weight.scales) for weight in weights]
    parts = [
        (weight.values.view(torch.uint8), (weight.scales / output[:, None]).half())
        for weight, output in zip(weights, outputs, strict=True)
    ]
    return native.pack_groups(
        parts,
        num_inputs=weights[0].shape[1],
        kind=str(dtype).removeprefix("torch."),
        group=weights[0].group,
        zero=0,
        scales=torch.cat(outputs) * (256 if dtype is torch.float8_e4m3fn else 1),
        bias=bias,
    )


def _zero_of(weight: GroupedWeight) -> int | None:
    """Return the value that stands for nothing, if it is the same of all groups, else -1; None: all weights are zero."""
    ratios = -weight.minimums / weight.scales
    known = ratios[ratios.isfinite()]
    if not known.numel() and not weight.minimums.any():
        return None
    zero = int(known[0].round()) if known.numel() else 0
    is_zero = 0 <= zero < 256 and torch.equal(weight.scales * -zero, weight.minimums)
    return zero if is_zero else -1


def _output_scales(scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """Return what each output's scales and minimums are divided by, so that float16 holds them, float32 ``[N]``.

    A power of two, which rounds nothing; where all groups have one scale, that scale, of which float16 would lose bits, unless
    minimums would lose some by it.
    """
    minimums = torch.zeros_like(scales) if minimums is None else minimums
    largest = torch.maximum(scales.abs(), minimums.abs()).amax(1)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    first = scales[:, 0]
    ratios = minimums / first[:, None]
    is_one = ((scales == first[:, None]) & (ratios.half().float() == ratios)).all(1)
    return torch.where(largest.isfinite(), torch.where(is_one, first, power), torch.nan)


def _side_by_side_biases(weights: Sequence[HeldWeight], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    none = [
        torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(none)
