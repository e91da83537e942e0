"""Options of attention: one value of each layer, read from its module's call and handed whole to every kernel.

A new option is a field here, its place in ``scores`` or in ``packed``, and its use in the kernels that compute scores themselves
(``attention_softmax.h``, ``triton_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import torch

__all__ = ["ARGUMENTS", "NUMBERS", "PACKED", "AttentionOptions"]

ARGUMENTS: Final = ("scaling", "softcap", "s_aux")
"""Keyword arguments with which modules of transformers call attention, in the order of the fields of :class:`AttentionOptions`."""

NUMBERS: Final = ("scale", "softcap")
"""Fields that are numbers to a kernel, in the order in which they are packed."""

PACKED: Final = "float[] numbers, Tensor? sinks"
"""Packed options in the schema of an operator."""


class AttentionOptions(NamedTuple):
    """Options of one layer's attention; a named tuple, which torch.compile can trace.

    Attributes:
        scale: Factor of the scores; None is D ** -0.5.
        softcap: Scores become softcap × tanh(score / softcap); None leaves them.
        sinks: ``[H]``, a score that takes part in the softmax and yields nothing; None adds none.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options in the keyword arguments of a module's call; others are ignored. Pure."""
        return cls(*map(arguments.get, ARGUMENTS))

    @classmethod
    def unpacked(cls, numbers: Sequence[float], sinks: torch.Tensor | None) -> Self:
        """Return the options that :meth:`packed` gave. Pure."""
        scale, softcap = numbers
        return cls(scale=scale, softcap=softcap or None, sinks=sinks)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but a scale, which every fused kernel takes."""
        return self.softcap is None and self.sinks is None

    def scores(self, products: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return the scores, float32, of products of queries and keys. Pure.

        Source: soft-capping before the mask, Gemma 2 report, arXiv:2408.00118, section 2.

        Args:
            products: Any shape.
            head_dim: D.
        """
        scores = products.float() * (head_dim**-0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores

    def packed(self, head_dim: int) -> tuple[list[float], torch.Tensor | None]:
        """Return ``NUMBERS`` and float32 sinks, as compiled kernels take them; a softcap of 0 stands for none. Pure.

        Args:
            head_dim: D.
        """
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return [scale, self.softcap or 0.0], None if self.sinks is None else self.sinks.float().contiguous()
