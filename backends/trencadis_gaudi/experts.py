"""Mixture of experts in the vendor's kernel if it supports the experts, else every expert on every token with routing weights.

transformers would use ``torch._grouped_mm``, for which a Gaudi has no kernel, or a loop over the chosen experts, whose shapes
depend on data.

The kernel is ``torch.ops.hpu.mixture_of_experts.fused_weights``: experts of gate and up in one matrix, one after the other; silu, gelu
or relu; no bias. The vendor plugin's ``bias_fused_weights`` for gpt-oss has no published meaning, and is not used.

Source of the kernel: gaudi-pytorch-bridge 1.19.0, habana_eager/eager_custom_op_register.cpp (signature, and its meaning in plain
operations); vllm-gaudi 091bbadd, vllm_gaudi/ops/hpu_fused_moe.py (types of the routing tensors).
Shapes: T tokens, H hidden size, E experts, K experts of a token, I intermediate size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from trencadis.errors import ModelLoadError
from trencadis_gaudi.fused.agreement import drawn, why_wrong
from trencadis_gaudi.fused.meanings import mixture_of_experts
from trencadis_gaudi.kernels import EXPERTS, ExpertsKernel, refuse

__all__ = ["dense_experts", "kernel_experts", "use_experts"]

_DENSE, _KERNEL = "trencadis_dense", "trencadis_mixture"
_ACTIVATIONS = ("silu", "gelu", "relu")
_BY_DATA = ("DbrxExperts", "JetMoeParallelExperts")
"""Classes of experts that transformers 5.24 can only run with shapes that depend on the routing."""
_AT_ONCE = 8
"""Experts in one matrix product; more would only need more memory for results."""


def use_experts(model: Any, find_kernel: Callable[[], ExpertsKernel | None], device: torch.device) -> Counter[str]:
    """Make a model's experts run with static shapes; return the number of modules in the kernel by class.

    Args:
        model: Model of transformers.
        find_kernel: Returns the vendor's kernel, or None for plain operations.
        device: Device of the kernel.

    Raises:
        ModelLoadError: Shapes of the model's experts depend on the routing, and transformers has no other way to run them.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if fixed := next((name for part in model.modules() if (name := type(part).__name__) in _BY_DATA), None):
        raise ModelLoadError(
            f"{type(model).__name__}: shapes in {fixed} depend on the routing of each token; a Gaudi would compile every step.",
            hint='Set [backend] name = "torch".',
        )
    parts = [part for part in model.modules() if hasattr(part, "is_transposed") and hasattr(part, "down_proj")]
    if not parts:
        return Counter()
    served = Counter(type(part).__name__ for part in parts if _served(part))
    kernel = find_kernel() if served else None
    if kernel is not None and (why := why_wrong(kernel, mixture_of_experts, [_trial(model.dtype)], device)):
        refuse(EXPERTS, why)
        kernel = None
    ALL_EXPERTS_FUNCTIONS.register(_DENSE, dense_experts)
    if kernel is not None:
        ALL_EXPERTS_FUNCTIONS.register(_KERNEL, kernel_experts(kernel))
    model.set_experts_implementation(_DENSE if kernel is None else _KERNEL)
    return served if kernel is not None else Counter()


def _trial(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return trial arguments of a kernel: tokens of size 128, each with two of three experts of size 64."""
    ups, downs = ((drawn(3, 128, size, seed=size) / 8).to(dtype) for size in (128, 64))
    table = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], dtype=dtype)
    return drawn(4, 128, dtype=dtype), table, weights, list(ups), list(downs), True, "silu", 0, 2


def dense_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the experts' results ``[T, H]``; transformers defines the signature.

    Args:
        module: Experts module.
        hidden_states: Hidden states, ``[T, H]``.
        top_k_index: Experts of each token, ``[T, K]``.
        top_k_weights: Routing weights of these experts, ``[T, K]``.
    """
    has_gate, has_bias = getattr(module, "has_gate", True), module.has_bias
    name = "gate_up_proj" if has_gate else "up_proj"
    ups, downs = getattr(module, name), module.down_proj
    if not module.is_transposed:
        ups, downs = ups.transpose(1, 2), downs.transpose(1, 2)
    numbers = torch.arange(len(ups), device=top_k_index.device)
    chosen = top_k_index.unsqueeze(-1) == numbers
    weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1).t().unsqueeze(-1)
    total = torch.zeros_like(hidden_states, dtype=weights.dtype)
    for first in range(0, len(ups), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        inner = torch.matmul(hidden_states, ups[some])
        if has_bias:
            inner = inner + getattr(module, f"{name}_bias")[some].unsqueeze(1)
        inner = module._apply_gate(inner) if has_gate else module.act_fn(inner)  # noqa: SLF001 - transformers calls it so
        outer = torch.matmul(inner, downs[some])
        if has_bias:
            outer = outer + module.down_proj_bias[some].unsqueeze(1)
        if getattr(module, "has_post_expert_norm", False):
            outer = module.post_expert_norm(outer)
        total = total + (outer * weights[some]).sum(0)
    return total.to(hidden_states.dtype)


def kernel_experts(kernel: ExpertsKernel) -> Any:
    """Return a function like :func:`dense_experts` that calls a kernel for the experts modules that it supports."""

    def experts(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        activation = _served(module)
        if activation is None:
            return dense_experts(module, hidden_states, top_k_index, top_k_weights)
        return kernel(
            hidden_states,
            top_k_index.to(torch.int64),
            top_k_weights.to(hidden_states.dtype),
            list(module.gate_up_proj.unbind()),
            list(module.down_proj.unbind()),
            not module.is_transposed,
            activation,
            0,
            len(module.gate_up_proj) - 1,
        )

    return experts


def _served(module: Any) -> str | None:
    """Return the kernel's name of the experts' activation; None if the kernel does not support these experts."""
    plain = (
        getattr(module, "has_gate", True)
        and getattr(module, "is_concatenated", True)
        and not module.has_bias
        and not getattr(module, "has_post_expert_norm", False)
        and type(module)._apply_gate.__name__ == "_default_apply_gate"  # noqa: SLF001 - the same
    )
    activation = getattr(module.config, "hidden_act", None)
    return activation if plain and activation in _ACTIVATIONS else None
