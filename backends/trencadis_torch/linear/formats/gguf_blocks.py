"""Blocks of GGUF's kinds of tensors, as unsigned integers with a scale and a minimum for each group.

In numpy, as its loops take one thread: for pieces as small as these PyTorch's threads cost several times what they do.

Each equals ``gguf.quants.dequantize`` in float32 bit for bit: a product of a scale and an integer has at most 24 bits, so that of
``scale · value + minimum`` the sum alone is rounded, where that function rounds its difference.

Shapes: B blocks, E elements of a block, G elements of a group.

Source: ``ggml-common.h`` and ``ggml-quants.c`` of ggml-org/ggml; ``gguf.quants``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from trencadis.gguf_file import TensorKind
from trencadis_torch.linear.held import GroupedWeight, HeldWeight, IntegerGroups

__all__ = ["FORMS", "BlocksWeight", "GroupedForm", "unpacked"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Unpacked = tuple[Bytes, Floats, Floats]
"""Values uint8 ``[B, E]``, scales and minimums float32 ``[B, E / G]``."""

_AT_ONCE: Final = 1 << 18
"""Bytes of blocks that are unpacked at a time, which bounds what is held beside the result."""

_LET_GO_EVERY: Final = 64
"""Pieces of that size."""


@attrs.frozen
class GroupedForm:
    """How a kind is held.

    Attributes:
        bits: 4 or 8.
        group: G.
        unpack: From blocks, uint8 ``[B, bytes]``.
        levels: Table in which values are places, 16 of them; None: values are integers themselves.
    """

    bits: int
    group: int
    unpack: Callable[[Bytes], Unpacked]
    levels: tuple[int, ...] | None = None

    @property
    def table(self) -> torch.Tensor | None:
        """The table, uint8 ``[16]``."""
        return None if self.levels is None else torch.tensor(self.levels, dtype=torch.uint8)


@attrs.frozen(eq=False)
class BlocksWeight(IntegerGroups):
    """A matrix as it is stored, in blocks. A large one is unpacked some outputs at a time.

    Attributes:
        raw: Rows as stored, uint8 ``[N, bytes]``.
        kind: One of :data:`FORMS`.
        let_go: Takes pages of the file that were read out of this process's memory.
    """

    raw: torch.Tensor
    kind: TensorKind
    let_go: Callable[[], None]

    @property
    def bits(self) -> int:  # type: ignore[override]
        """4 or 8."""
        return FORMS[self.kind.name].bits

    @property
    def levels(self) -> torch.Tensor | None:  # type: ignore[override]
        """Table of the kind; None: its values are integers."""
        return FORMS[self.kind.name].table

    @property
    def group(self) -> int:
        """G."""
        return FORMS[self.kind.name].group

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.raw.shape[0], self.raw.shape[1] // self.kind.num_bytes * self.kind.block

    def unpacked(self) -> GroupedWeight:
        """Return the values, a byte each."""
        return unpacked(self.raw, self.kind, self.let_go)

    def dequantised(self) -> torch.Tensor:
        """Return float32 ``[N, K]``."""
        return self.unpacked().dequantised()

    def rows(self, index: slice | torch.Tensor) -> BlocksWeight:
        """Return some outputs as they are stored."""
        return attrs.evolve(self, raw=self.raw[index])

    def columns(self, index: slice) -> HeldWeight:
        """Return a range of inputs, unpacked."""
        return self.unpacked().columns(index)


def unpacked(raw: torch.Tensor, kind: TensorKind, let_go: Callable[[], None]) -> GroupedWeight:
    """Return a matrix that is stored in blocks.

    Args:
        raw: Rows as stored, uint8 ``[N, bytes]``.
        kind: One of :data:`FORMS`.
        let_go: Takes pages of ``raw`` that were read out of this process's memory; called time and again.
    """
    form, rows = FORMS[kind.name], raw.numpy()
    num_rows, num_columns = len(rows), rows.shape[1] // kind.num_bytes * kind.block
    values = np.empty((num_rows, num_columns), np.uint8)
    scales = np.empty((num_rows, num_columns // form.group), np.float32)
    minimums = np.empty_like(scales)
    step = max(1, _AT_ONCE // rows.shape[1])
    for first in range(0, num_rows, step):
        at = slice(first, first + step)
        found = form.unpack(rows[at].reshape(-1, kind.num_bytes))
        values[at] = found[0].reshape(-1, num_columns)
        scales[at], minimums[at] = (part.reshape(-1, scales.shape[1]) for part in found[1:])
        if first // step % _LET_GO_EVERY == _LET_GO_EVERY - 1:
            let_go()
    let_go()
    tensors = (torch.from_numpy(values), torch.from_numpy(scales), torch.from_numpy(minimums))
    return GroupedWeight(*tensors, form.bits, form.table)


def _half(blocks: Bytes, at: int) -> Floats:
    """Return a float16 of each block as float32 ``[B, 1]``."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _fields(packed: Bytes, width: int, shifts: Sequence[int], mask: int) -> Bytes:
    """Return bit fields of bytes: of each ``width`` bytes all at the first shift, then all at the next."""
    runs = packed.reshape(len(packed), -1, 1, width)
    fields: Bytes = (runs >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return fields.reshape(len(packed), -1)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    return _fields(packed, width, (0, 4), 15)


def _bits(packed: Bytes) -> Bytes:
    """Return the bits of bytes, the lowest first."""
    return _fields(packed, 1, range(8), 1)


def _joined(low: Bytes, high: Bytes, shift: int) -> Bytes:
    """Return values out of their low bits and the others."""
    joined: Bytes = low | high << np.uint8(shift)
    return joined


def _symmetric(values: Bytes, scales: Floats, zero: int) -> Unpacked:
    return values, scales, np.float32(-zero) * scales


def _q4_0(blocks: Bytes) -> Unpacked:
    return _symmetric(_nibbles(blocks[:, 2:], 16), _half(blocks, 0), 8)


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Unpacked:
    values = _joined(_nibbles(blocks[:, 6:], 16), _bits(blocks[:, 2:6]), 4)
    return _symmetric(values, _half(blocks, 0), 16)


def _q5_1(blocks: Bytes) -> Unpacked:
    values = _joined(_nibbles(blocks[:, 8:], 16), _bits(blocks[:, 4:8]), 4)
    return values, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    return _symmetric(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), 128)  # int8 plus 128 is uint8


def _q2_k(blocks: Bytes) -> Unpacked:
    scales = blocks[:, :16]
    values = _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    return values, _half(blocks, 80) * (scales & 15), -_half(blocks, 82) * (scales >> 4)


def _q3_k(blocks: Bytes) -> Unpacked:
    values = _joined(_fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 3), _fields(blocks[:, :32], 32, range(8), 1), 2)
    low, high = _nibbles(blocks[:, 96:104], 8), _fields(blocks[:, 104:108], 4, (0, 2, 4, 6), 3)
    return _symmetric(values, _half(blocks, 108) * (_joined(low, high, 4).astype(np.float32) - np.float32(32)), 4)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and minimums of the eight groups of Q4_K and Q5_K, float32 ``[B, 8]`` each: of 6 bits, by the block's own."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, high & 15 | low >> 2 & 48), 1)
    minimums = np.concatenate((middle & 63, high >> 4 | middle >> 2 & 48), 1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _q4_k(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Unpacked:
    values = _joined(_nibbles(blocks[:, 48:], 32), _fields(blocks[:, 16:48], 32, range(8), 1), 4)
    return values, *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Unpacked:
    values = _joined(_nibbles(blocks[:, :128], 64), _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3), 4)
    scales = blocks[:, 192:208].view(np.int8)
    return _symmetric(values, _half(blocks, 208) * scales, 32)


_IQ4: Final = tuple(127 + one for one in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_E2M1: Final = tuple(12 + one for one in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the values of the format, plus 12."""


def _iq4_nl(blocks: Bytes) -> Unpacked:
    return _symmetric(_nibbles(blocks[:, 2:], 16), _half(blocks, 0), 127)


def _iq4_xs(blocks: Bytes) -> Unpacked:
    values = _nibbles(blocks[:, 8:], 16)
    low, high = _nibbles(blocks[:, 4:8], 1), _fields(blocks[:, 2:4], 1, (0, 2, 4, 6), 3)
    return _symmetric(values, _half(blocks, 0) * (_joined(low, high, 4).astype(np.float32) - np.float32(32)), 127)


def _mxfp4(blocks: Bytes) -> Unpacked:
    exponent = blocks[:, :1].astype(np.int32)
    halved = (
        np.where(exponent < 2, 0x200000 << np.minimum(exponent, 1), (exponent - 1) << 23)
        .astype(np.int32)
        .view(np.float32)
    )
    return _symmetric(_nibbles(blocks[:, 1:], 16), halved, 12)


FORMS: Final[Mapping[str, GroupedForm]] = {
    "Q4_0": GroupedForm(4, 32, _q4_0),
    "Q4_1": GroupedForm(4, 32, _q4_1),
    "Q5_0": GroupedForm(8, 32, _q5_0),
    "Q5_1": GroupedForm(8, 32, _q5_1),
    "Q8_0": GroupedForm(8, 32, _q8_0),
    "Q2_K": GroupedForm(4, 16, _q2_k),
    "Q3_K": GroupedForm(4, 16, _q3_k),
    "Q4_K": GroupedForm(4, 32, _q4_k),
    "Q5_K": GroupedForm(8, 32, _q5_k),
    "Q6_K": GroupedForm(8, 16, _q6_k),
    "IQ4_NL": GroupedForm(4, 32, _iq4_nl, _IQ4),
    "IQ4_XS": GroupedForm(4, 32, _iq4_xs, _IQ4),
    "MXFP4": GroupedForm(4, 32, _mxfp4, _E2M1),
}
"""Kinds that are read, by name."""
