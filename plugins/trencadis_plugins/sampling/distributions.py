"""Distributions for acceptance rules, and their random numbers.

Shapes: L logits rows in a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.interfaces import Distributions
from trencadis_plugins.sampling.arithmetic import likeliest
from trencadis_plugins.sampling.drawing import draw, num_times
from trencadis_plugins.sampling.philox import Purpose, RowNumbers

__all__ = ["KeyedDistributions", "distributions_of"]


def distributions_of(logits: torch.Tensor, *, is_greedy: torch.Tensor) -> torch.Tensor:
    """Return softmax; for greedy rows one-hot at the largest logit, the lowest id among equals: ``[L, V]``. Pure.

    Args:
        logits: Processed, float32 ``[L, V]``; of each row one at least is finite.
        is_greedy: bool ``[L]``.
    """
    best = likeliest(logits)[:, None]
    certain = torch.zeros_like(logits).scatter_(1, best, 1.0)
    return torch.where(is_greedy[:, None], certain, logits.softmax(-1))


class KeyedDistributions(Distributions):
    """Distributions whose random numbers depend on a row's seed and the chosen token's position, not on the batch.

    Args:
        probabilities: ``[L, V]``.
        keys: Low and high half of each row's seed, int64 ``[L, 2]``.
        positions: Position of the token that yields each logits row, ``[L]``.
    """

    def __init__(self, probabilities: torch.Tensor, *, keys: np.ndarray, positions: Sequence[int]) -> None:
        self._probabilities = probabilities
        self._numbers = RowNumbers(keys=keys, positions=np.add(positions, 1), device=probabilities.device)

    @property
    def probabilities(self) -> torch.Tensor:
        """``[L, V]``."""
        return self._probabilities

    def uniforms(self) -> torch.Tensor:
        """Return a number of the open interval (0, 1) for each logits row, ``[L]``: float64, or float32 where there is no float64."""
        return self._numbers.uniforms(Purpose.ACCEPT)

    def draw(self, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return tokens drawn in proportion to weights, int64 ``[n]``; see :func:`~trencadis_plugins.sampling.drawing.draw`."""
        logits = weights.float().log()
        times = self._numbers.times(Purpose.RESIDUAL, num_times(weights.shape[1]), index)
        return draw(logits, logits.amax(-1), times)
