"""Angles by which heads are turned, as kernels take them: cosines and sines of every position.

    frequencies of a rotary module ─▶ Frequencies    wherever they reproduce what the module gives, bit for bit
    else the module itself         ─▶ ModuleAngles

Shapes: T tokens, R elements of a head that are turned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.linear.heads import in_order
from trencadis_torch.linear.scaling import QueryScales

__all__ = ["AngleSource", "Angles", "Frequencies", "ModuleAngles", "simplified"]

AngleSource = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From positions, int64 ``[T]``, to float32 cosines and sines ``[T, R]``: those of all first elements, then those of all second ones."""

_COMPARED: Final = 1024
"""Positions in a row, and as many at growing distances, for which frequencies are compared with the module."""


@attrs.frozen(eq=False)
class Frequencies:
    """Angles that are multiples of the position.

    Attributes:
        frequencies: Radians from one position to the next, float32 ``[R / 2]``.
        scale: Factor of cosines and sines.
    """

    frequencies: torch.Tensor
    scale: float

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see :data:`AngleSource`."""
        turns = positions[:, None].float() * self.frequencies
        both = torch.cat([turns, turns], -1)
        return both.cos() * self.scale, both.sin() * self.scale


@attrs.frozen(eq=False)
class ModuleAngles:
    """Angles that a model's own module computes.

    Attributes:
        rotary: The module.
        arguments: More of its arguments: the kind of layer.
        spread: Order of angles; see :class:`~trencadis_torch.linear.heads.Heads`.
        once: The same.
    """

    rotary: nn.Module
    arguments: tuple[str, ...]
    spread: bool
    once: bool

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see :data:`AngleSource`."""
        cosines, sines = self.rotary(torch.empty(1, 1, 1), positions[None], *self.arguments)
        found = in_order(cosines[0], sines[0], spread=self.spread, once=self.once)
        return found[0].float(), found[1].float()


def simplified(angles: ModuleAngles, num_positions: int) -> AngleSource:
    """Return the frequencies of a module that reproduce its angles, or the angles as they are. Pure.

    Args:
        angles: Angles of the module.
        num_positions: Number of positions of the longest text.
    """
    near = torch.arange(min(num_positions, _COMPARED))
    far = torch.linspace(0, num_positions - 1, min(num_positions, _COMPARED), dtype=torch.float64).long()
    positions = torch.cat([near, far])
    expected = angles(positions)
    for one in _candidates(angles.rotary, expected[0].shape[1]):
        if all(map(torch.equal, one(positions), expected)):
            return one
    return angles


def _candidates(rotary: Any, size: int) -> Iterator[Frequencies]:
    """Yield the frequencies that a module may have."""
    tensors = [*rotary.buffers(recurse=False), *rotary.parameters(recurse=False)]
    scales = dict.fromkeys([1.0, *(float(one) for one in vars(rotary).values() if type(one) in (int, float))])
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.shape == (size // 2,):
            for scale in scales:
                yield Frequencies(tensor.detach().float().clone(), scale)


@attrs.define(eq=False)
class Angles:
    """Cosines and sines by position, computed once, for as many positions as were needed so far.

    Attributes:
        source: Computes them.
        scales: Factors of queries by position; None: there are none.
        cosines: Cosines of the positions so far, float32 ``[T, R]``.
        sines: The same.
        query_scales: The factors, float32 ``[T]``; None: there are none.
    """

    source: AngleSource
    scales: QueryScales | None = None
    cosines: torch.Tensor = attrs.field(init=False, factory=lambda: torch.empty(0, 0))
    sines: torch.Tensor = attrs.field(init=False, factory=lambda: torch.empty(0, 0))
    query_scales: torch.Tensor | None = attrs.field(init=False, default=None)

    @torch.no_grad()
    def reach(self, num_positions: int) -> None:
        """Have the angles of positions below a number in ``cosines`` and ``sines``."""
        if num_positions > len(self.cosines):
            positions = torch.arange(max(256, 1 << (num_positions - 1).bit_length()))
            self.cosines, self.sines = (one.contiguous() for one in self.source(positions))
            self.query_scales = None if self.scales is None else self.scales(positions)
