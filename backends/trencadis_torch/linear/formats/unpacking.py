"""From stored words and bytes to values: what several formats have in common."""

from __future__ import annotations

import math

import torch

from trencadis_torch.linear.held import SMALLEST_GROUP, Float8Weight, FloatWeight, GroupedWeight, HeldWeight

__all__ = [
    "float8_scales",
    "float8_weight",
    "fp4_groups",
    "integer_groups",
    "nibbles",
    "packed_integers",
    "powers_of_two",
    "scaled_float8",
]

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 4 bit floats E2M1 by their bits, all of them integers.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""

_LARGEST = max(E2M1_DOUBLED)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of 4 bits in words of any integer type, lowest bits first. Pure.

    Args:
        packed: ``[..., P]``.

    Returns:
        uint8 ``[..., P * 2 * itemsize]``.
    """
    octets = packed.contiguous().view(torch.uint8)
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 scales that are stored as exponents in a byte (E8M0): ``2 ** (byte - 127)``, exactly; 255 is not a number. Pure.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1.
    """
    table = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]
    return torch.tensor(table, dtype=torch.float32)[exponents.view(torch.uint8).int()]


def packed_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of 4 or 8 bits in int32 words ``[R, P]`` as uint8 ``[R, P * 32 / bits]``, lowest bits first. Pure."""
    return nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)


def integer_groups(
    values: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    index: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> HeldWeight:
    """Return ``scale · (value - zero)``; exact where scales have 16 bits.

    With act-order groups are scattered over the inputs: columns are put in the order of their groups, and the weight has the order of
    its inputs. Where groups are not of one size, it becomes floats of 16 bits, rounded as quantisers' own dequantisation rounds.

    Args:
        values: uint8 ``[N, K]``, below ``2 ** bits``.
        zeros: ``[N, groups]``, by what values are too large.
        scales: ``[N, groups]``.
        bits: 4 or 8.
        index: Group of each input, ``[K]``; None: groups are equal runs of inputs, in order.
        dtype: Floats it becomes where groups are not of one size and scales are float32.
    """
    num_groups = scales.shape[1]
    runs = torch.arange(num_groups) if index is None else _runs(index, values.shape[1] // num_groups)
    order: torch.Tensor | None = None
    if runs is None:
        assert index is not None
        order = torch.argsort(index, stable=True)
        runs = _runs(index[order], values.shape[1] // num_groups)
    if runs is not None:
        scales, zeros = scales[:, runs].float().contiguous(), zeros[:, runs].float()
        values = values if order is None else values[:, order]
        return GroupedWeight(values=values, scales=scales, minimums=-zeros * scales, bits=bits, order=order)
    floats = scales.float()[:, index] * (values.float() - zeros.float()[:, index])
    return FloatWeight(floats.to(dtype if scales.dtype == torch.float32 else scales.dtype))


def _runs(index: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return the groups in the order of their inputs, if each run of ``group`` inputs has one; None: they are scattered. Pure."""
    if group == 0 or index.shape[0] % group:
        return None
    runs = index.reshape(-1, group)
    return runs[:, 0] if bool((runs == runs[:, :1]).all()) else None


def fp4_groups(packed: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
    """Return a matrix of 4 bit floats as places in a table of integers from 0 to 24: twice the value is one from -12 to 12. Pure.

    Exact where scales are powers of two up to 2 ** 124; else within two float32 roundings of a group's largest.

    Args:
        packed: uint8 ``[N, K / 2]``, the even inputs in the low bits.
        scales: float32 ``[N, K / G]``.
    """
    levels = torch.tensor([value + _LARGEST for value in E2M1_DOUBLED], dtype=torch.uint8)
    halves = scales * 0.5
    return GroupedWeight(nibbles(packed), halves, -float(_LARGEST) * halves, 4, levels)


def float8_weight(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> HeldWeight:
    """Return ``scale · value``, exactly and in 8 bits, if blocks are runs of at least 16 inputs and no value is NaN; else as floats. Pure.

    Args:
        values: float8 ``[N, K]``.
        scales: Scales; see :func:`scaled_float8`.
        block: Outputs and inputs of a block, or None; see :func:`scaled_float8`.
        dtype: Floats it becomes else.
    """
    columns = values.shape[1]
    floats, width = _float8_scales(values, scales, block)
    run = math.gcd(columns, width)
    if run < min(SMALLEST_GROUP, columns) or _has_nan(values):
        return FloatWeight(scaled_float8(values, scales, block).to(dtype))
    return Float8Weight(values, floats.repeat_interleave(width // run, dim=1)[:, : columns // run].contiguous())


def _has_nan(values: torch.Tensor) -> bool:
    """Return whether a float8 matrix has what is no finite number, whose bits kernels would read as one."""
    largest = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[values.dtype]
    return bool(((values.view(torch.uint8) & 0x7F) > largest).any())


def scaled_float8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return ``scale · value`` in float32; the last blocks may be cut. Pure.

    Args:
        values: float8 ``[N, K]``.
        scales: Scales of the matrix, of each output or of each block (:func:`float8_scales`); floats, or exponents in a byte.
        block: Outputs and inputs of a block by the configuration; None: it says nothing of blocks.
    """
    floats, width = _float8_scales(values, scales, block)
    return values.float() * floats.repeat_interleave(width, dim=1)[:, : values.shape[1]]


def _float8_scales(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None
) -> tuple[torch.Tensor, int]:
    """Return the scales of each output, float32 ``[N, blocks]``, and the inputs of a block, of which the last may have fewer."""
    rows, columns = values.shape
    found = float8_scales(tuple(scales.shape), rows, columns, block)
    assert found is not None, "shapes are checked before weights are read"
    shape, (height, width) = found
    is_exponents = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    floats = (powers_of_two(scales) if is_exponents else scales.float()).reshape(shape)
    return floats.repeat_interleave(min(height, rows), dim=0)[:rows], width


def float8_scales(
    shape: tuple[int, ...], outputs: int, inputs: int, block: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the shape of scales as a matrix, and outputs and inputs of a block; None: they do not go with the weight. Pure.

    Args:
        shape: Scales as they are stored.
        outputs: Rows of the weight.
        inputs: Columns of the weight.
        block: Outputs and inputs that share a scale by the configuration; None: it says nothing of blocks.
    """
    if block is not None:
        blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
        if shape == blocks:
            return blocks, block
    if shape in ((), (1,), (1, 1)):
        return (1, 1), (outputs, inputs)
    if shape in ((outputs,), (outputs, 1)):
        return (outputs, 1), (1, inputs)
    return None
