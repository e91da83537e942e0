"""Modules in place of whole norms, MLPs and rotary attentions of transformers: fewer, larger operations, the same sums.

What a module computes is read by :mod:`trencadis_torch.linear.readers`, off its parts and what really went through it: nothing here is used
for a module that it does not reproduce.

Shapes: T tokens, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import nn

from trencadis_torch.linear.heads import Heads

__all__ = ["FusedKernels", "FusedMLP", "FusedNorm", "RotaryAttention"]


class FusedKernels(Protocol):
    """Kernels that the fused modules call: those of the CPU's library, or Triton's."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / sqrt(mean(x²) + eps) * weight``, over the last axis."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Return ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias``, over the last axis."""
        ...

    def activate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(x)``."""
        ...

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(gates) * values`` from both side by side, ``[..., 2 N]`` to ``[..., N]``."""
        ...

    def rotate(self, x: torch.Tensor, heads: Heads, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Norm, where weights are given, and turn query and key heads in place.

        Args:
            x: Queries, keys and values side by side, ``[..., T, (H + 2 KV) D]``, contiguous.
            heads: Sizes, norms and the way of turning.
            angles: Cosines and sines, ``[..., T, R]`` each, R at most D, in the order that :meth:`Heads.angles` gives; None: nothing is
                turned.
        """
        ...


class FusedNorm(nn.Module):
    """Norm over the last axis: by the root mean square, or by mean and variance.

    Args:
        weight: Factors of the normed values, ``[size]``.
        eps: Added to the mean square, or to the variance.
        native: The kernels.
        bias: Added in the end, or None.
        centred: By mean and variance.

    Attributes:
        weight: Factors as a parameter: it is small, and tells the model's dtype and device.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        native: FusedKernels,
        *,
        bias: torch.Tensor | None = None,
        centred: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.eps = eps
        self.centred = centred
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many elements, of the same dtype."""
        if self.centred:
            return self._native.layer_norm(x, self.weight, self.bias, self.eps)
        return self._native.rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product; or ``down(activation(up(x)))``.

    Args:
        gate_up: Both side by side, or up alone.
        down: Back.
        activation: Number of the function in ``ACTIVATIONS``.
        native: The kernels.
        gated: Whether there are gates.

    Attributes:
        down_proj: Projection back to the hidden size.
    """

    def __init__(
        self,
        gate_up: Callable[..., Any],
        down: Callable[..., Any],
        activation: int,
        native: FusedKernels,
        *,
        gated: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down
        self.activation = activation
        self.gated = gated
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., K]`` from ``[..., K]``."""
        made = self.gate_up(x)
        active = (
            self._native.gate(made, self.activation) if self.gated else self._native.activate(made, self.activation)
        )
        out: torch.Tensor = self.down_proj(active)
        return out


class RotaryAttention(nn.Module):
    """Self-attention with rotated queries and keys: one product for all three, then norms and rotation in place.

    What attends stays transformers' choice, and is called as the replaced module called it.

    Args:
        qkv: Queries, keys and values side by side.
        out: Back to the hidden size.
        original: The module it stands for, whose configuration and place it takes.
        options: Options that the original hands to attention besides tensors.
        unused: Names of what the original is given and does not hand on, a cache among them: each release of
            transformers has names of its own.
        heads: Sizes, norms and the way of turning.
        native: The kernels.

    Attributes:
        o_proj: Back to the hidden size.
        heads: Sizes, norms as parameters, and the way of turning.
        head_dim: D.
        options: Options that attention gets besides tensors.
    """

    OF_ORIGINAL: ClassVar = ("config", "_attention_functions")
    """Attributes that are taken of the original module."""

    def __init__(
        self,
        qkv: Callable[..., Any],
        out: Callable[..., Any],
        *,
        original: Any,
        options: dict[str, Any],
        unused: frozenset[str],
        heads: Heads,
        native: FusedKernels,
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.o_proj = out
        self.take_place_of(original)
        self.layer_idx = original.layer_idx
        self.head_dim = heads.head_dim
        self.num_key_value_groups = heads.num_heads // heads.num_kv_heads
        self.is_causal = True
        self.options = options
        self._unused = unused
        # Parameters, though small, for whoever counts a model's memory.
        self.query_norm, self.key_norm = (
            None if norm is None else nn.Parameter(norm, requires_grad=False)
            for norm in (heads.query_norm, heads.key_norm)
        )
        # Such as sinks, which some of transformers' attention functions read of the module.
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.heads = attrs.evolve(heads, query_norm=self.query_norm, key_norm=self.key_norm)
        self._native = native

    def take_place_of(self, original: Any) -> None:
        """Attend as a module of transformers is configured to."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.config = original.config
        self._attention_functions = ALL_ATTENTION_FUNCTIONS

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return ``[..., T, hidden size]``, and attention's second result; as transformers' layers call it."""
        whole, heads = self.qkv(hidden_states), self.heads
        angles = position_embeddings if heads.turns else None
        self._native.rotate(whole, heads, None if angles is None else heads.angles(*angles))
        if heads.scales is not None:
            heads.scale(whole, others["position_ids"])
        split = whole.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = split.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        handed = {name: value for name, value in others.items() if name not in self._unused}
        attend = self._attention_functions[getattr(self.config, "_attn_implementation", "")]
        attended, weights = attend(self, query, key, value, attention_mask, **{**handed, **self.options})
        return self.o_proj(attended.flatten(-2).contiguous()), weights
