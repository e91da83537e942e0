"""Look-up shared by strategies: the cheapest prepared bucket that covers a shape.

    distinct sizes of an axis     1   2   4        a shape of batch size 3 falls between 2 and 4: cell 2
                                0 | 1 | 2 | 3      cell 3 holds None: nothing is that large

One cell for each combination of axis intervals holds the answer for every shape that falls into it, so that a look-up
is three bisections and one index.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, Phase, Shape, UnifiedBucket, UnifiedShape

__all__ = ["BucketTable", "padded_cost"]

_MAX_CELLS = 1 << 24

_AXES = "batch_size", "query_len", "num_blocks"
_UNIFIED_AXES = "query_len", "num_blocks", "num_unique_blocks"
"""What differs between the buckets of a phase: three sizes of each kind of shape."""


def padded_cost(bucket: Shape) -> int:
    """Return the relative cost of a pass in ``bucket``. Pure; grows with every dimension.

    Prefill: token positions × (128 + context blocks): a token costs its share of the matrix products and the attention
    over its context, and 128 blocks of context about double it. Decode: KV blocks + 3 × token positions: a step reads
    its blocks, and a row costs as much as about three of them. Unified: token positions × (128 + shared blocks), for every
    token is compared with every shared block, and with all tokens if the pass is causal; + unique blocks, which are read.

    Source: prefill, 24·L·h² matrix-product operations and 4·L·h operations a context token, which are equal at 6·h
    tokens: 128 blocks of 128 tokens at h ≈ 2,700. Decode, a model of 20 µs a sequence and 7 µs a block; not measured.
    """
    if isinstance(bucket, UnifiedShape):
        own_blocks = -(-bucket.num_tokens // 128) if bucket.is_causal else 0
        return bucket.num_tokens * (128 + bucket.num_blocks + own_blocks) + bucket.num_unique_blocks
    if bucket.phase is Phase.PREFILL:
        return bucket.num_tokens * (128 + bucket.num_blocks)
    return bucket.num_blocks + 3 * bucket.num_tokens


class BucketTable:
    """Finds the cheapest bucket that covers a shape. Immutable.

    Holds a cell of four bytes for each combination of the distinct sizes of a phase, 2²⁴ at most: a grid of buckets needs
    about one for each, and 250 buckets that share no size still fit.

    Args:
        buckets: Prepared buckets of both phases, in any order; all unified or none.

    Raises:
        ConfigValueError: There are more combinations of sizes than cells.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        unified = any(isinstance(bucket, UnifiedBucket) for bucket in buckets)
        axes = _UNIFIED_AXES if unified else _AXES
        self._prefill = _PhaseTable([bucket for bucket in buckets if bucket.phase is Phase.PREFILL], axes)
        # A causal bucket serves a pass without prefills, too.
        self._decode = _PhaseTable([bucket for bucket in buckets if unified or bucket.phase is Phase.DECODE], axes)

    def find(self, shape: Shape) -> Bucket | None:
        """Return the bucket of least :func:`padded_cost` that covers ``shape``, or None if none does.

        Among equal costs the smallest by fields wins. Pure; O(log n), about 1 µs.
        """
        return (self._prefill if shape.phase is Phase.PREFILL else self._decode).find(shape)


class _PhaseTable:
    def __init__(self, buckets: Sequence[Bucket], axes: tuple[str, str, str]) -> None:
        ranked = sorted(set(buckets), key=lambda bucket: (padded_cost(bucket), bucket))
        self._sizes: Callable[[Shape], tuple[int, int, int]] = attrgetter(*axes)
        columns = np.array([self._sizes(bucket) for bucket in ranked], np.int64).reshape(-1, 3).T
        self._first, self._second, self._third = (sorted(set(column.tolist())) for column in columns)
        # One cell more on each axis, for shapes larger than any bucket.
        cells = (len(self._first) + 1, len(self._second) + 1, len(self._third) + 1)
        if math.prod(cells) > _MAX_CELLS:
            raise ConfigValueError(
                f"{len(ranked)} {ranked[0].phase.value} buckets have {cells[0] - 1} values of {axes[0]}, {cells[1] - 1} of "
                f"{axes[1]} and {cells[2] - 1} of {axes[2]}: {math.prod(cells)} combinations, more than {_MAX_CELLS}.",
                hint="Use fewer different sizes, shared by several buckets.",
            )
        best = np.full(cells, len(ranked), np.int32)
        # Backwards, so that of two buckets of the same sizes, one of them causal, the cheaper stays.
        for rank in reversed(range(len(ranked))):
            best[self._cell(ranked[rank])] = rank
        for axis in range(3):
            # A bucket also serves every cell below its own: the best of a cell is the least rank above it.
            best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis), axis)
        self._answers: list[Bucket | None] = [*ranked, None]
        # A memoryview is indexed three times as fast as an array, and takes half the memory of a list.
        self._ranks = memoryview(best.ravel().tobytes()).cast("i")
        self._strides = best.shape[1], best.shape[2]

    def _cell(self, shape: Shape) -> tuple[int, int, int]:
        first, second, third = self._sizes(shape)
        return bisect_left(self._first, first), bisect_left(self._second, second), bisect_left(self._third, third)

    def find(self, shape: Shape) -> Bucket | None:
        first, second, third = self._cell(shape)
        return self._answers[self._ranks[(first * self._strides[0] + second) * self._strides[1] + third]]
