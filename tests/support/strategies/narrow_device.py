"""A device without 64-bit arithmetic, on the CPU: what a Gaudi makes of int64 and float64 in lazy mode.

Source: HabanaAI/gaudi-pytorch-bridge 1.19, ``PT_ENABLE_INT64_SUPPORT`` (default false): int64 is computed as int32, float64 as float32.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_HERE = threading.local()


class NarrowDevice(TorchDispatchMode):
    """While it is active, every tensor of its thread is on the device: 64-bit numbers keep their type and lose half of their bits.

    Sums and cumulative sums are made one number after the other in float32, the worst order that a device may have.

    Attributes:
        wrapped: Operations in which an int64 did not fit into int32.
        doubles: Operations with a float64 argument or result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrapped: list[str] = []
        self.doubles: list[str] = []

    def __enter__(self) -> Self:
        _HERE.is_device = True
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _HERE.is_device = False
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = str(func.overloadpacket), dict(kwargs or {})
        self._narrow(name, (args, kwargs))
        result = _summed(name, args)
        if result is None:
            result = func(*args, **kwargs)
        self._narrow(name, (args, kwargs, result))
        return result

    def _narrow(self, name: str, values: Any) -> None:
        tree_map_only(torch.Tensor, lambda tensor: self._narrow_one(name, tensor), values)

    def _narrow_one(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype is torch.float64:
            self.doubles.append(name)
            tensor.copy_(tensor.float().double())
        elif tensor.dtype is torch.int64:
            narrow = tensor.int().long()
            if not torch.equal(narrow, tensor):
                self.wrapped.append(name)
                tensor.copy_(narrow)


def _summed(name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the result of a sum over the last dimension of floating-point numbers; None for other operations."""
    if name not in {"aten.sum", "aten.cumsum"} or not args[0].is_floating_point():
        return None
    over = args[1] if len(args) > 1 else None
    if over not in (-1, [-1]):
        return None
    sums = torch.from_numpy(np.cumsum(args[0].float().numpy(), axis=-1, dtype=np.float32)).to(args[0].dtype)
    if name == "aten.cumsum":
        return sums
    keeps = len(args) > 2 and args[2]
    return sums[..., -1:].clone() if keeps else sums[..., -1].clone()


class With64Bits:
    """For ``arithmetic._WITH_64_BITS``: the CPU is the device where one is active, and the host elsewhere."""

    def __contains__(self, device_type: str) -> bool:
        return device_type == "cpu" and not getattr(_HERE, "is_device", False)
