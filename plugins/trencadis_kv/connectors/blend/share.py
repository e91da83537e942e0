"""What blending takes, as a share of what computing the same tokens takes: predicted, and corrected by what it took."""

from __future__ import annotations

import math

__all__ = ["BlendShare"]

_FIRST_LAYERS = 1.4
"""Layers that all tokens go through: the first, and that part of the second that comes before its attention. The share of the
second is that of keys, values and queries in the products of a Llama layer, rounded up."""
_WEIGHT = 0.3
_LEAST, _MOST = 0.1, 10.0


class BlendShare:
    """Learns how far its prediction is off. One thread.

    Args:
        num_layers: Of the model.
    """

    def __init__(self, *, num_layers: int) -> None:
        self._floor = min(1.0, _FIRST_LAYERS / num_layers)
        self._factor = 1.0

    def of(self, share: float) -> float:
        """Return the share of the time. Pure.

        Args:
            share: Of the tokens that go through all layers, 0 .. 1.
        """
        return self._factor * (self._floor + (1.0 - self._floor) * share)

    def took(self, *, predicted_s: float, seconds: float) -> None:
        """Learn from a prediction of :meth:`of` and what it came to; one of nothing is ignored."""
        if not seconds > 0.0 or not predicted_s > 0.0 or math.isinf(predicted_s):
            return
        found = self._factor * seconds / predicted_s
        self._factor = min(_MOST, max(_LEAST, (1.0 - _WEIGHT) * self._factor + _WEIGHT * found))
