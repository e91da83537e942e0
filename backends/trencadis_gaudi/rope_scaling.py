"""Rotary frequencies that no forward changes: a captured graph may neither read positions on the host nor copy from it.

Of transformers' rotary embeddings those of the types ``dynamic`` and ``longrope`` compare the largest position with the length that the
model was trained on, and choose other frequencies beyond. No text here is longer (``ModelFacts.max_model_len``), so they never change.

Source: transformers 5.24, modeling_rope_utils.py, dynamic_rope_update; models/phimoe/modeling_phimoe.py, PhimoeRotaryEmbedding.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

__all__ = ["fix_frequencies"]


def fix_frequencies(model: Any) -> None:
    """Make the rotary embeddings of a model use the frequencies that it was trained with; called where it still is on the CPU."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeRotaryEmbedding":
            module.forward = MethodType(_phimoe_forward, module)
        elif (plain := getattr(type(module).forward, "__wrapped__", None)) is not None and hasattr(module, "rope_type"):
            module.forward = MethodType(plain, module)


def _phimoe_forward(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[1, T, D]`` of the type of ``x``; the original makes its frequencies on the host in each forward."""
    rope = self.config.rope_parameters
    scale = 1.0 if rope["rope_type"] == "default" else rope["short_mscale"]
    angles = position_ids[..., None].float() * self.inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
