"""Query and key heads of an attention: their sizes, norms and the way in which they are turned."""

from __future__ import annotations

from enum import IntFlag

import attrs
import torch

from trencadis_torch.linear.scaling import QueryScales

__all__ = ["Heads", "How", "in_order"]


class How(IntFlag):
    """Ways of norms and rotation, as ``rows.h`` numbers them; else each head is normed before it is turned.

    Attributes:
        HALVES: Elements i and i + R / 2 are turned together.
        PAIRS: Elements 2 i and 2 i + 1 are, instead.
        NORMS_AFTER: Norms stand behind the rotation.
        NORMS_WHOLE: All queries of a token are normed as one, and all keys.
    """

    HALVES = 0
    PAIRS = 1
    NORMS_AFTER = 2
    NORMS_WHOLE = 4


@attrs.frozen(kw_only=True, eq=False)
class Heads:
    """Query and key heads of an attention.

    Attributes:
        num_heads: H.
        num_kv_heads: KV.
        head_dim: D.
        query_norm: Weights, ``[D]``, or ``[H D]`` if all are normed as one; None: there is no norm.
        key_norm: The same of the keys.
        eps: Number that both norms add to the mean square.
        how: Norms and rotation.
        spread: Whether angles come as [a, a, b, b]; else as [a, b, a, b].
        once: Whether they come as [a, b], once for both elements that are turned together.
        turns: Whether heads are turned at all.
        scales: Scales of queries by their positions, applied last; None: there are none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    eps: float = 0.0
    how: How = How.HALVES
    spread: bool = False
    once: bool = False
    turns: bool = True
    scales: QueryScales | None = None

    def scale(self, heads: torch.Tensor, positions: torch.Tensor) -> None:
        """Scale queries by their positions, in place.

        Args:
            heads: Queries, keys and values side by side, ``[B, T, (H + 2 KV) D]``.
            positions: int64 ``[B, T]``, or ``[1, T]`` of all.
        """
        assert self.scales is not None, "asked for where there are some"
        scales = self.scales(positions.flatten()).view(*positions.shape, 1)
        heads[..., : self.num_heads * self.head_dim] *= scales.to(heads)

    def angles(self, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines in the order that kernels take: those of all first elements, then those of all second ones. Pure."""
        return in_order(cosines, sines, spread=self.spread, once=self.once)


def in_order(
    cosines: torch.Tensor, sines: torch.Tensor, *, spread: bool, once: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines as kernels take them, ``[..., R]`` each. Pure.

    Args:
        cosines: Cosines in the module's order.
        sines: The same.
        spread: Order of angles; see :class:`Heads`.
        once: Whether angles come once; see :class:`Heads`.
    """
    if once:
        return torch.cat([cosines, cosines], -1), torch.cat([sines, sines], -1)
    if not spread:
        return cosines, sines
    first, second = (torch.cat([one[..., ::2], one[..., 1::2]], -1) for one in (cosines, sines))
    return first, second
