"""How keys and values are held in the cache: in the model's dtype, in 16 bits, or as int8 with a scale after each head.

int8 is symmetric: per token and head, scale = largest magnitude / 127, element = scale × level, level in -127 .. 127. The float32
scale lies after the levels of its head, so that whoever moves blocks moves it too; a head then has four elements more.

Shapes: T tokens, KV heads, D head dimension, D' elements as stored.
"""

from __future__ import annotations

import torch

__all__ = ["STORED_DTYPES", "decode", "encode", "stored_dim"]

SCALE_BYTES = 4

STORED_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
"""By the name that settings give them."""

_LEVELS = 127.0


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of one head as stored. Pure."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def encode(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values as stored, ``[..., D']``. Pure.

    What float16 cannot hold becomes its largest number: an infinity would make the whole row no number.

    Args:
        new: ``[..., D]``.
        dtype: Data type of the cache.
    """
    if dtype is torch.int8:
        scale = new.float().abs().amax(-1, keepdim=True) / _LEVELS
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        levels = (new.float() * inverse).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
        return torch.cat([levels, scale.view(torch.int8)], dim=-1)
    if dtype is torch.float16 and new.dtype is not torch.float16:
        largest = torch.finfo(torch.float16).max
        return new.clamp(-largest, largest).to(torch.float16)
    return new.to(dtype)


def decode(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return stored elements, ``[..., D]``, as another dtype. Pure.

    Args:
        stored: ``[..., D']``.
        dtype: To compute in.
    """
    if stored.dtype is not torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scale).to(dtype)
