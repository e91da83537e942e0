"""Modules in place of whole norms, gated MLPs and rotary attentions of transformers: fewer, larger operations, the same sums.

What a module computes is read off its class's name by :mod:`trencadis_torch.linear.replacement` and then proved on what really went through it:
nothing here is used for a module that it does not reproduce.

Shapes: T tokens, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["FusedKernels", "FusedNorm", "GatedMLP", "RotaryAttention"]


class FusedKernels(Protocol):
    """Kernels that the fused modules call: those of the CPU's library, or Triton's."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / sqrt(mean(x²) + eps) * weight``, over the last axis."""
        ...

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(gates) * values`` from both side by side, ``[..., 2 N]`` to ``[..., N]``."""
        ...

    def rotate(
        self,
        x: torch.Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        eps: float,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> None:
        """Norm, where weights are given, and turn query and key heads in place.

        Args:
            x: Queries, keys and values side by side, ``[..., T, (H + 2 KV) D]``, contiguous.
            num_heads: H.
            num_kv_heads: KV.
            head_dim: D.
            norms: Weights of the queries' and the keys' norm, ``[D]`` each, or None.
            eps: Of the norms.
            cosines: ``[..., T, R]``, R at most D: the pairs are (i, i + R / 2).
            sines: The same.
        """
        ...


class FusedNorm(nn.Module):
    """Root mean square norm over the last axis.

    Args:
        weight: What the normed values are multiplied by, ``[size]``.
        eps: Added to the mean square.
        native: The kernels.

    Attributes:
        weight: As given, a parameter: it is small, and tells the model's dtype and device.
        eps: As given.
    """

    def __init__(self, weight: torch.Tensor, eps: float, native: FusedKernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many elements, of the same dtype."""
        return self._native.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product.

    Args:
        gate_up: Both side by side.
        down: Back.
        activation: Its number in ``ACTIVATIONS``.
        native: The kernels.

    Attributes:
        gate_up: As given.
        down_proj: As given.
        activation: As given.
    """

    def __init__(
        self, gate_up: Callable[..., Any], down: Callable[..., Any], activation: int, native: FusedKernels
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down
        self.activation = activation
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., K]`` from ``[..., K]``."""
        out: torch.Tensor = self.down_proj(self._native.gate(self.gate_up(x), self.activation))
        return out


class RotaryAttention(nn.Module):
    """Self-attention with rotated queries and keys: one product for all three, then norms and rotation in place.

    What attends stays transformers' choice, and is called as the replaced module called it.

    Args:
        qkv: Queries, keys and values side by side.
        out: Back to the hidden size.
        original: The module it stands for, whose sizes and norms it takes.
        options: What the original hands to attention besides tensors.
        unused: Names of what the original is given and does not hand on, a cache among them: each release of
            transformers has names of its own.
        norms: Weights of the queries' and the keys' norm, or None.
        eps: Of the norms.
        native: The kernels.

    Attributes:
        qkv: As given.
        o_proj: Back to the hidden size.
        num_heads: H.
        num_kv_heads: KV.
        head_dim: D.
        query_norm: Weights of the queries' norm, or None.
        key_norm: The same of the keys.
        eps: Of the norms.
        options: What attention is told besides tensors.
    """

    def __init__(
        self,
        qkv: Callable[..., Any],
        out: Callable[..., Any],
        *,
        original: Any,
        options: dict[str, Any],
        unused: frozenset[str],
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        eps: float,
        native: FusedKernels,
    ) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().__init__()
        self.qkv = qkv
        self.o_proj = out
        self.config = original.config
        self.layer_idx = original.layer_idx
        self.head_dim = int(original.head_dim)
        self.num_heads = original.q_proj.out_features // self.head_dim
        self.num_kv_heads = original.k_proj.out_features // self.head_dim
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.is_causal = True
        self.options = options
        self._unused = unused
        # Parameters, though small, for whoever counts a model's memory.
        self.query_norm, self.key_norm = (
            None if norm is None else nn.Parameter(norm, requires_grad=False) for norm in norms
        )
        self.eps = eps
        self._native = native
        self._attention_functions = ALL_ATTENTION_FUNCTIONS

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return ``[..., T, hidden size]``, and attention's second result; as transformers' layers call it."""
        whole = self.qkv(hidden_states)
        self._native.rotate(
            whole,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norms=(self.query_norm, self.key_norm),
            eps=self.eps,
            cosines=position_embeddings[0],
            sines=position_embeddings[1],
        )
        heads = whole.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        handed = {name: value for name, value in others.items() if name not in self._unused}
        attend = self._attention_functions[getattr(self.config, "_attn_implementation", "")]
        attended, weights = attend(self, query, key, value, attention_mask, **{**handed, **self.options})
        return self.o_proj(attended.flatten(-2).contiguous()), weights
