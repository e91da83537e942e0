"""The best sizes of one dimension: an exact dynamic program.

Sizes c_1 ≤ … ≤ c_n with weights w_1 … w_n; K of them are kept, the last among them, and each size runs at the next kept
one. With W_j = w_1 + … + w_j, the least cost of the first j sizes with k kept, the j-th last, is

    F_k(j) = min over i < j of F_{k-1}(i) + (W_j - W_i) · c_j

The added cost D(i, j) = (W_j - W_i) · c_j satisfies the
quadrangle inequality, so the best i moves up with j: divide and conquer finds a row of F in O(n log n).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.records import FloatArray, Int64Array

__all__ = ["optimal_sizes"]


def optimal_sizes(costs: Sequence[float], weights: Sequence[float], num_kept: int) -> list[int]:
    """Return the positions of the sizes to keep, ascending, the last size among them. Pure, exact, O(num_kept · n · log n).

    Fewer are kept where more would not help.

    Args:
        costs: Cost of running at each size, not falling, at least one.
        weights: How often each size is asked for, at least 0 each.
        num_kept: At least 1.

    Raises:
        ValueError: No size, unequal lengths, costs that fall, or ``num_kept`` below 1.
    """
    cost = np.asarray(costs, np.float64)
    weight = np.asarray(weights, np.float64)
    if not len(cost) or len(cost) != len(weight) or num_kept < 1 or bool(np.any(np.diff(cost) < 0)):
        raise ValueError(f"{num_kept} of {len(cost)} sizes with {len(weight)} weights: costs must not fall")
    total = np.concatenate([[0.0], np.cumsum(weight)])
    # best[j]: least cost of the first j sizes with the sizes kept so far; choice[k][j]: how many of them lie below the last.
    best = np.concatenate([[0.0], total[1:] * cost])
    choices = [np.zeros(len(cost) + 1, np.int64)]
    for _ in range(min(num_kept, len(cost)) - 1):
        following = best.copy()
        choice = choices[-1].copy()
        _row(best, total, cost, following, choice)
        if following[-1] >= best[-1]:
            break
        choices.append(choice)
        best = following
    kept, end = [], len(cost)
    for choice in reversed(choices):
        if end:
            kept.append(end - 1)
            end = int(choice[end])
    return kept[::-1]


def _row(best: FloatArray, total: FloatArray, cost: FloatArray, following: FloatArray, choice: Int64Array) -> None:
    """Fill the next row of F and its choices."""
    parts = [(1, len(cost), 0, len(cost) - 1)]
    while parts:
        first, last, low, high = parts.pop()
        if first > last:
            continue
        middle = (first + last) // 2
        end = min(high, middle - 1)
        values = best[low : end + 1] + (total[middle] - total[low : end + 1]) * cost[middle - 1]
        place = int(values.argmin())
        following[middle], choice[middle] = values[place], low + place
        parts += [(first, middle - 1, low, low + place), (middle + 1, last, low + place, high)]
