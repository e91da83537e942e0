"""RMS norms of a model in the vendor's kernel.

A module is replaced if it agrees with the kernel's reference: with random weights, in float32, on inputs so small that epsilon matters and
on large ones. In 16 bits the kernel rounds once, after the weight; modules like Llama's also round before it.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import torch
from torch import nn

from trencadis_gaudi.fused.agreement import agrees, drawn, why_wrong
from trencadis_gaudi.fused.meanings import rms_norm
from trencadis_gaudi.kernels import NORM, NormKernel, refuse

__all__ = ["FusedNorm", "fuse_norms"]


class FusedNorm(nn.Module):
    """RMS norm that calls the kernel.

    Args:
        kernel: Vendor's kernel.
        weight: Factor after the norm.
        eps: Number added to the mean square.
    """

    def __init__(self, kernel: NormKernel, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._kernel = kernel
        self._eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm of the last dimension, of the input's type."""
        return self._kernel(hidden_states, self.weight, self._eps).to(hidden_states.dtype)


@torch.no_grad()
def fuse_norms(model: Any, kernel: NormKernel, device: torch.device) -> Counter[str]:
    """Replace a model's RMS norms by the kernel where it agrees; return the number of replaced modules by class.

    Args:
        model: Model on the CPU.
        kernel: Vendor's kernel.
        device: Device of the kernel.
    """
    fused: dict[int, FusedNorm] = {}
    served: Counter[str] = Counter()
    for path, norm in list(model.named_modules(remove_duplicate=False)):
        if id(norm) not in fused:
            weight = _weight_of(norm)
            if weight is None:
                continue
            if not fused and (why := why_wrong(kernel, rms_norm, _trials(model.dtype), device)):
                refuse(NORM, why)
                break
            fused[id(norm)] = FusedNorm(kernel, weight, _eps_of(norm))
            served[type(norm).__name__] += 1
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, fused[id(norm)])
    return served


def _trials(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Return trial arguments: tokens and heads, with weights of the model's type and of float32 (norms with one plus a weight)."""
    tokens, heads = drawn(1, 3, 64, dtype=dtype), drawn(1, 3, 2, 64, dtype=dtype)
    return [(x, drawn(64, seed=1, dtype=kind), 1e-2) for x in (tokens, heads) for kind in {dtype, torch.float32}]


def _eps_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _weight_of(norm: nn.Module) -> torch.Tensor | None:
    """Return the kernel's weight for a module; None if the module does not agree with the kernel."""
    weight, eps = dict(norm.named_parameters()).get("weight"), _eps_of(norm)
    is_candidate = (
        isinstance(eps, float)
        and weight is not None
        and weight.dim() == 1
        and len(norm.state_dict()) == 1
        and len(inspect.signature(norm.forward).parameters) == 1
    )
    if not is_candidate or weight is None:
        return None
    trial = copy.deepcopy(norm).float()
    size = len(weight)
    trial.get_parameter("weight").copy_(drawn(size, seed=1))
    x = (drawn(1, 3, size) + 0.5) * torch.tensor([eps**0.5, 1.0, 30.0]).unsqueeze(-1)
    expected = trial(x)
    if agrees(rms_norm(x, drawn(size, seed=1), eps), expected):
        return weight.detach()
    if agrees(rms_norm(x, 1.0 + drawn(size, seed=1), eps), expected):
        # In float32, since one plus a small 16-bit weight would lose bits.
        return 1.0 + weight.detach().float()
    return None
