"""The vendor's fused attention kernel, and a CPU function with the same signature.

Shapes: B sequences, H query heads, KV key-value heads, Q queries, L keys, D head dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis_gaudi.emulated.device import EmulatedDeviceError

__all__ = ["FusedSDPA", "emulated_fused_sdpa", "fused_attention"]


class FusedSDPA(Protocol):
    """``FusedSDPA.apply`` of ``habana_frameworks.torch.hpex.kernels``, bridge 1.19, up to the last argument in use."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        softmax_mode: str,
        recompute_mode: bool | None,
        valid_seq_len: torch.Tensor | None,
        seq_padding_type: str,
        /,
    ) -> torch.Tensor:
        """Return ``[B, H, Q, Dv]``."""
        ...


def fused_attention(
    kernel: FusedSDPA,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    query_lens: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return attention outputs ``[B, H, Q, Dv]`` of the kernel.

    The kernel takes either a mask or the causal flag; without a mask, padding is on the right.

    Args:
        kernel: Vendor's kernel, or the emulated one.
        query: Queries, ``[B, H, Q, D]``.
        keys: Keys, ``[B, KV, L, D]``.
        values: Values, ``[B, KV, L, Dv]``.
        mask: Visibility, bool ``[B, 1, Q, L]``, True where a query sees a key; None: causal attention with Q = L.
        query_lens: Number of real queries of each sequence without a mask, int64 ``[B]``; 0 counts as 1.
        scale: Factor of the scores; None: D ** -0.5.

    Source: vllm-gaudi, extension/ops.py, prompt_fsdpa.
    """
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, float("-inf"))
        return kernel(query, keys, values, bias, 0.0, False, scale, "fast", True, None, "right")
    # A softmax over no keys would be NaN, which would spread from the padding block, since 0 × NaN is NaN.
    lengths = None if query_lens is None else query_lens.clamp(min=1).int()
    return kernel(query, keys, values, None, 0.0, True, scale, "fast", True, lengths, "right")


def emulated_fused_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    recompute_mode: bool | None = None,
    valid_seq_len: torch.Tensor | None = None,
    seq_padding_type: str = "left",
    return_dropout_mask: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Return ``[B, H, Q, Dv]``, computed in float32 on the CPU; outputs of padding are zero.

    Args:
        q: Queries, ``[B, H, Q, D]``.
        k: Keys, ``[B, KV, L, D]``.
        v: Values, ``[B, KV, L, Dv]``.
        attn_mask: Additive mask of the scores, ``[B or 1, H or 1, Q, L]``; None: no mask.
        dropout_p: Dropout probability; must be 0.
        is_causal: Whether query i sees only keys up to i; requires Q = L.
        scale: Factor of the scores; None: D ** -0.5.
        softmax_mode: ``None``, ``fast`` or ``fp32``; all give the same result here.
        recompute_mode: Ignored here.
        valid_seq_len: Number of real tokens of each sequence, ``[B]``, for causal attention.
        seq_padding_type: Side of the padding; ``right`` with ``valid_seq_len``.
        return_dropout_mask: Must be False.
        return_attn_probs: Must be False.

    Raises:
        EmulatedDeviceError: The kernel does not support the arguments.
    """
    if is_causal and attn_mask is not None:
        raise EmulatedDeviceError("FusedSDPA takes a mask or is_causal, not both.")
    if dropout_p or return_dropout_mask or return_attn_probs:
        raise EmulatedDeviceError("the emulated FusedSDPA is for inference: no dropout, no attention probabilities.")
    if softmax_mode not in {"None", "fast", "fp32"}:
        raise EmulatedDeviceError(f"FusedSDPA knows no softmax_mode {softmax_mode!r}; choose None, fast or fp32.")
    if valid_seq_len is not None and (not is_causal or seq_padding_type != "right"):
        raise EmulatedDeviceError("the emulated FusedSDPA takes valid_seq_len with is_causal and right padding only.")
    repeats = q.shape[1] // k.shape[1]
    keys, values = (part.float().repeat_interleave(repeats, dim=1) for part in (k, v))
    mask = None if attn_mask is None else attn_mask.float()
    output = scaled_dot_product_attention(q.float(), keys, values, mask, is_causal=is_causal, scale=scale)
    if valid_seq_len is not None:
        # With right padding and causal attention no real query sees padding, so only outputs of padding differ.
        padding = torch.arange(q.shape[2], device=q.device) >= valid_seq_len[:, None]
        output = output.masked_fill(padding[:, None, :, None], 0.0)
    return output.to(v.dtype)
