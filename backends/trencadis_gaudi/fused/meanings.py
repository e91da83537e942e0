"""References of the vendor's kernels in plain operations, as published: for comparison, and for the emulated device.

Sources: gaudi-pytorch-bridge 1.19.0 (5a56187). Norm: ``tests/pytest_working/any_mode/test_hpu_rms_norm.py``, and ``RMSNormMeta`` in
``hpu_ops/backend/rms_norm_gen.cpp`` for the type of the result. Rotary: docstring of ``apply_rotary_pos_emb`` in
``hpex/kernels/RotaryPosEmbeddingHelper.py``. Experts: ``mixture_of_experts_common`` in ``habana_eager/eager_custom_op_register.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import gelu, relu, silu

__all__ = ["mixture_of_experts", "rms_norm", "rotary_blockwise", "rotary_pairwise"]

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu, "gelu": gelu, "relu": relu}


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * gamma`` along the last dimension; float32 if the types of x and gamma differ. Pure."""
    wide = x.float()
    result = gamma.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
    return result.to(x.dtype if x.dtype == gamma.dtype else torch.float32)


def rotary_blockwise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate element i of the last dimension with element i + D / 2; float32 if any argument is. Pure."""
    first, second = x.chunk(2, dim=-1)
    return _rotated(x, torch.cat([-second, first], dim=-1), cos, sin)


def rotary_pairwise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate element 2i of the last dimension with element 2i + 1; float32 if any argument is. Pure."""
    return _rotated(x, torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2), cos, sin)


def _rotated(x: torch.Tensor, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    is_wide = torch.float32 in (x.dtype, cos.dtype, sin.dtype)
    x, turned, cos, sin = (part.to(torch.float32 if is_wide else x.dtype) for part in (x, turned, cos, sin))
    return (x * cos) + (turned * sin)


def mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """Return the weighted sum of the experts' results; arguments as in :class:`trencadis_gaudi.experts.ExpertsKernel`. Pure."""
    act = _ACTIVATIONS[activation]
    total = torch.zeros_like(hidden_states)
    for number, both, down in zip(range(experts_min, experts_max + 1), w12, w3, strict=True):
        gate, up = (part.T if permuted_weights else part for part in both.chunk(2, 0 if permuted_weights else 1))
        result = (act(hidden_states @ gate) * (hidden_states @ up)) @ (down.T if permuted_weights else down)
        weight = (router_weights * (expert_routing_table == number)).sum(-1, keepdim=True)
        total = total + result * weight.to(result.dtype)
    return total
