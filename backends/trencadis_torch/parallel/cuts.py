"""Parts of tensors that one rank holds: ranges of one dimension, side by side, and zeros up to the size that every rank's part has."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from trencadis.errors import ModelLoadError

__all__ = ["Cut", "even", "halves", "padded"]


@attrs.frozen
class Cut:
    """A part of a tensor.

    Attributes:
        dim: Which dimension is divided.
        ranges: Taken runs, first and one past the last; none: nothing, the part is all zeros.
        size: Size of the dimension in the part; positions that the ranges do not fill are zeros.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    def shape(self, whole: torch.Size) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of some shape. Pure."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def take(self, source: Any) -> torch.Tensor:
        """Return the part. Of what lies in a file no more is read.

        Args:
            source: A tensor, or a slice of ``safetensors``.
        """
        return torch.cat([source[(slice(None),) * self.dim + (slice(*one),)] for one in self.ranges], self.dim)


def even(num: int, *, dim: int, rank: int, size: int, what: str) -> Cut:
    """Return a rank's part of a dimension divided evenly. Pure.

    Args:
        num: Size of the dimension.
        dim: Which.
        rank: Rank within the group.
        size: Number of ranks of the group.
        what: Names the tensor in an error.

    Raises:
        ModelLoadError: It cannot be divided so.
    """
    return halves(num, dim=dim, rank=rank, size=size, what=what, parts=1)


def halves(num: int, *, dim: int, rank: int, size: int, what: str, parts: int = 2) -> Cut:
    """Return a rank's part of a dimension that holds several things side by side: the rank's share of each. Pure.

    Args:
        num: Size of the dimension.
        dim: Which.
        rank: Rank within the group.
        size: Number of ranks of the group.
        what: Names the tensor in an error.
        parts: How many things.

    Raises:
        ModelLoadError: It cannot be divided so.
    """
    each, left = divmod(num, parts * size)
    if left:
        legal = [str(n) for n in range(1, num // parts + 1) if num % (parts * n) == 0][:12]
        raise ModelLoadError(
            f"[parallel] tensor = {size}: {what} has {num // parts} outputs or inputs to divide, not a multiple of {size}.",
            hint=f"Set [parallel] tensor to one of: {', '.join(legal)}.",
        )
    whole = num // parts
    ranges = tuple((part * whole + rank * each, part * whole + (rank + 1) * each) for part in range(parts))
    return Cut(dim, ranges, each * parts)


def padded(num: int, *, dim: int, rank: int, size: int) -> Cut:
    """Return a rank's part of a vocabulary: as many rows on each, the last ones of which may be zeros. Pure.

    Args:
        num: Tokens.
        dim: Which dimension they are.
        rank: Rank within the group.
        size: Number of ranks of the group.
    """
    each = -(-num // size)
    first = min(num, rank * each)
    last = min(num, first + each)
    return Cut(dim, ((first, last),) if last > first else (), each)
