"""Sums whose every bit is defined: ((t0 + t1) + t2) + ..., in float32 for 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trencadis.errors import CollectiveError

__all__ = ["ordered_sum", "require_summable"]

_SHORT = (torch.bfloat16, torch.float16)


def require_summable(tensor: torch.Tensor) -> None:
    """Raise unless a tensor may be summed in place.

    Raises:
        CollectiveError: It is not contiguous, or of a dtype that has no sum.
    """
    dtype = tensor.dtype
    if dtype == torch.bool or (dtype.itemsize == 1 and dtype.is_floating_point):
        raise CollectiveError(f"all_reduce sums floats of 16 bits or more and integers, not {dtype}.")
    if not tensor.is_contiguous():
        raise CollectiveError(
            f"all_reduce needs a contiguous tensor, not strides {tensor.stride()} of {tuple(tensor.shape)}."
        )


def ordered_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of tensors, first to last, to ``out``, which may be one of them; of 16-bit floats rounded once."""
    if out.dtype in _SHORT:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
    elif len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        total = torch.add(parts[0], parts[1])
        for part in parts[2:-1]:
            total += part
        torch.add(total, parts[-1], out=out)
