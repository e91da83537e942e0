"""Whether draws are of a distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

__all__ = ["chi_square_fails"]

ALPHA = 1e-6


def chi_square_fails(cells: np.ndarray, distribution: np.ndarray) -> bool:
    """Whether chi-square rejects the distribution at one in a million; rare cells are taken together.

    Source: critical value after Wilson and Hilferty, "The distribution of chi-square", 1931.
    """
    counts = np.bincount(cells, minlength=len(distribution)).astype(float)
    assert not counts[distribution == 0].any(), "what is impossible was drawn"
    order = np.argsort(distribution)
    counts, expected = counts[order], distribution[order] * len(cells)
    num_rare = int((expected.cumsum() < 20).sum()) + 1
    counts = np.append(counts[:num_rare].sum(), counts[num_rare:])
    expected = np.append(expected[:num_rare].sum(), expected[num_rare:])
    freedom, spread = len(counts) - 1, 2 / (9 * (len(counts) - 1))
    critical = freedom * (1 - spread + NormalDist().inv_cdf(1 - ALPHA) * math.sqrt(spread)) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() > critical)
