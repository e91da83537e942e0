"""Fused projections that plans of transformers leave whole, divided where a trial shows how they are made.

A plan gathers the outputs of ``qkv_proj`` and ``gate_up_proj`` on every rank, for nothing says in which order their parts lie. A module tells
itself: its projections are exchanged for made-up numbers, and one sees where these go. Nothing is assumed that the trial does not show.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import nn

from trencadis_torch.parallel.heads import LocalConfig

__all__ = ["gates_side_by_side", "heads_side_by_side"]

_TRIED: Final = "trencadis_heads"


class _Instead(nn.Module):
    """Gives one tensor, whatever it gets, and keeps what it got; without a tensor it gives that back."""

    def __init__(self, output: torch.Tensor | None = None) -> None:
        super().__init__()
        self.output = output
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x if self.output is None else self.output


@torch.no_grad()
def heads_side_by_side(module: Any, *, num_heads: int, num_kv_heads: int, fused: str, out: str) -> bool:
    """Return whether an attention's fused projection has the queries of all heads, then their keys, then their values.

    Args:
        module: The attention; its weights are not used.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        fused: Name of the fused projection.
        out: Name of the output projection.
    """
    from transformers import AttentionInterface

    width = getattr(module, fused).out_features
    dim, left = divmod(width, num_heads + 2 * num_kv_heads)
    if left:
        return False
    AttentionInterface.register(_TRIED, _keep)
    numbers = torch.arange(width, dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    tried = _with(module, fused, _Instead(numbers[None, None]))
    back = _Instead()
    setattr(tried, out, back)
    tried.config = LocalConfig(module.config, _attn_implementation=_TRIED)
    angles = torch.ones(1, 1, dim), torch.zeros(1, 1, dim)
    try:
        tried(torch.zeros(1, 1, 1), position_embeddings=angles, attention_mask=None, trencadis_found=found)
    except Exception:
        return False  # of whatever kind: it is not called as others are
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    parts = torch.split(numbers.view(-1, dim), list(sizes))
    in_order = all(
        found[name].shape == (1, num, 1, dim) and torch.equal(found[name][0, :, 0], part)
        for name, num, part in zip(("query", "key", "value"), sizes, parts, strict=True)
    )
    return in_order and torch.equal(back.seen.flatten(), parts[0].flatten())


def _keep(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_found: dict[str, torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Note what an attention function gets; returns the queries as it would return outputs."""
    trencadis_found.update(query=query, key=key, value=value)
    return query.transpose(1, 2).contiguous(), None


@torch.no_grad()
def gates_side_by_side(module: Any, *, fused: str, out: str) -> bool:
    """Return whether an MLP's fused projection has all gates, then all values they gate.

    Args:
        module: The MLP; its weights are not used.
        fused: Name of the fused projection.
        out: Name of the output projection.
    """
    width = getattr(module, fused).out_features
    half = width // 2
    if width % 4:
        return False
    numbers = torch.linspace(-3, 5, 2 * width).view(2, half, 2).transpose(1, 2).reshape(1, 2, width).contiguous()
    seen = []
    for kept in (slice(None), slice(0, half // 2), slice(half // 2, half)):
        tried = _with(module, fused, _Instead(torch.unflatten(numbers, -1, (2, half))[..., kept].flatten(-2)))
        back = _Instead()
        setattr(tried, out, back)
        try:
            tried(torch.zeros(1, 2, 1))
        except Exception:
            return False
        seen.append(back.seen)
    whole = torch.cat(seen[1:], -1)
    return whole.shape == seen[0].shape == (1, 2, half) and torch.equal(whole, seen[0])


def _with(module: Any, name: str, child: nn.Module) -> Any:
    """Return a copy of a module that has another child; the rest is shared."""
    tried = copy.copy(module)
    tried.__dict__["_modules"] = dict(module.__dict__["_modules"])
    setattr(tried, name, child)
    return tried
