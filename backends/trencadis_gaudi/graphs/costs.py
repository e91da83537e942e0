"""Estimates of the memory of graphs, fitted to the graphs captured so far."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

from trencadis.records import Bucket, Phase, UnifiedBucket

__all__ = ["GraphCosts", "cost_sizes"]

_TOLERANCE = 1e-6
"""Relative error below which a fit is exact."""


def cost_sizes(bucket: Bucket) -> tuple[int, ...]:
    """Return the sizes that a graph's memory may depend on, the likelier ones first. Pure.

    Tokens; KV blocks of all sequences; products of tokens with context and with the query, which are the sizes of scores and
    masks; sequences; and 1 for a constant.
    """
    blocks = bucket.num_blocks * (bucket.batch_size if bucket.phase is Phase.PREFILL else 1)
    if isinstance(bucket, UnifiedBucket):
        blocks += bucket.num_unique_blocks
    tokens = bucket.num_tokens
    return tokens, blocks, tokens * bucket.num_blocks, tokens * bucket.query_len, bucket.batch_size, 1


class GraphCosts:
    """Non-negative linear fit of graph memory over sizes, for the graphs of one phase.

    The fit is exact for memory that is linear in these sizes once the captured graphs differ in each size of a bucket: at
    most one graph for each size is underestimated. Until then the fit with the fewest sizes is used, first in proportion to
    tokens. If no fit is exact, the estimate is multiplied by the worst factor so far.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, ...]] = []
        self._bytes: list[int] = []
        self._weights: npt.NDArray[np.float64] | None = None

    def add(self, bucket: Bucket, num_bytes: int) -> None:
        """Add the memory of a captured graph, bytes."""
        self._sizes.append(cost_sizes(bucket))
        self._bytes.append(max(1, num_bytes))
        self._weights = None

    def estimate(self, bucket: Bucket) -> float:
        """Return the estimated memory of a graph, bytes; 0 before the first captured graph."""
        if not self._bytes:
            return 0.0
        if self._weights is None:
            self._weights = self._fit()
        return float(np.dot(self._weights, cost_sizes(bucket)))

    def _fit(self) -> npt.NDArray[np.float64]:
        """Return bytes for each size, by the best non-negative fit of relative errors over all subsets of sizes."""
        sizes = np.array(self._sizes, np.float64)
        scale = np.maximum(sizes.max(axis=0), 1.0)
        measured = np.array(self._bytes, np.float64)
        rows, ones = sizes / scale / measured[:, None], np.ones(len(measured))
        num_sizes = sizes.shape[1]
        best, least = np.zeros(num_sizes), np.inf
        for count in range(1, num_sizes + 1):
            for chosen in combinations(range(num_sizes), count):
                columns = rows[:, chosen]
                unit = columns.max()
                if not unit:
                    continue
                found = np.linalg.lstsq(columns / unit, ones, rcond=None)[0] / unit
                error = float(np.abs(columns @ found - 1).max())
                if error < least - _TOLERANCE and (found >= 0).all():
                    best, least = np.zeros(num_sizes), error
                    best[list(chosen)] = found
            if least < _TOLERANCE:
                break
        worst = max(1.0, float((1 / np.maximum(rows @ best, _TOLERANCE)).max()))
        weights: npt.NDArray[np.float64] = best / scale * worst
        return weights
