"""Comparison of results up to rounding, and of a kernel on the device with its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["agrees", "drawn", "why_wrong"]

_LEAST = 1e-5
"""Tolerance relative to the largest value, for float32 sums in another order."""


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether tensors have the same shape and type and differ by at most two units in the last place of the largest value. Pure."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = max(_LEAST, 2 * torch.finfo(expected.dtype).eps)
    return float((found.double() - expected.double()).abs().max()) <= tolerance * float(expected.abs().max())


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers on the CPU that depend only on the arguments. Pure."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def why_wrong(
    kernel: Callable[..., torch.Tensor],
    meaning: Callable[..., torch.Tensor],
    trials: Iterable[tuple[Any, ...]],
    device: torch.device,
) -> str | None:
    """Return why a kernel differs from its reference, or None if it agrees.

    Args:
        kernel: Kernel, which runs on the device.
        meaning: Reference in plain operations, which runs on the CPU.
        trials: Arguments of each trial, with tensors on the CPU.
        device: Device of the kernel.
    """
    for trial in trials:
        try:
            found = kernel(*(_moved(argument, device) for argument in trial)).cpu()
        except Exception as error:  # after any error plain operations are used instead
            return f"a trial of it ends with {type(error).__name__}: {error}"
        if not agrees(found, meaning(*trial)):
            return "it does not compute its published meaning"
    return None


def _moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, list):
        return [_moved(item, device) for item in argument]
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument
