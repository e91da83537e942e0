"""Whether two ways to compute the same agree but for rounding, and whether a kernel computes on the device what it is said to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["agrees", "drawn", "why_wrong"]

_LEAST = 1e-5
"""Difference, over the largest value, of float32 sums in another order."""


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether tensors are of one shape and type, and differ by rounding: two units of the largest value's last place. Pure."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = max(_LEAST, 2 * torch.finfo(expected.dtype).eps)
    return float((found.double() - expected.double()).abs().max()) <= tolerance * float(expected.abs().max())


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers of the CPU, the same in every call. Pure."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def why_wrong(
    kernel: Callable[..., torch.Tensor],
    meaning: Callable[..., torch.Tensor],
    trials: Iterable[tuple[Any, ...]],
    device: torch.device,
) -> str | None:
    """Return why a kernel does not compute its meaning, or None if it does.

    Args:
        kernel: Runs on the device.
        meaning: The same in plain operations, on the CPU.
        trials: Arguments, tensors on the CPU.
        device: Of the kernel.
    """
    for trial in trials:
        try:
            found = kernel(*(_moved(argument, device) for argument in trial)).cpu()
        except Exception as error:  # whatever it ends with, plain operations serve instead
            return f"a trial of it ends with {type(error).__name__}: {error}"
        if not agrees(found, meaning(*trial)):
            return "it does not compute its published meaning"
    return None


def _moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, list):
        return [_moved(item, device) for item in argument]
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument
