"""Base of strategies with a prepared table: look-up, fallback, and a log line of the prepared buckets.

distinct sizes of an axis     1   2   4        a shape of batch size 3 falls between 2 and 4: cell 2
                                0 | 1 | 2 | 3      cell 3 holds None: nothing is that large

One cell for each combination of axis intervals holds the answer for every shape that falls into it, so that a look-up
is three bisections and one index.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_plugins.bucketing.fallback import fallback_bucket, max_decode_blocks
from trencadis_plugins.bucketing.prompt_rules import PromptRules

__all__ = ["BucketTable", "TableStrategy", "or_largest", "padded_cost"]


_MAX_CELLS = 1 << 24

_AXES = "batch_size", "query_len", "num_blocks"
_UNIFIED_AXES = "query_len", "num_blocks", "num_unique_blocks"
"""Dimensions in which the buckets of a phase differ: three for each kind of shape."""


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


_log = logging.getLogger("trencadis.bucketing")

_MAX_LISTED = 256


class TableStrategy(BucketingStrategy):
    """Answers from the table that ``buckets`` lists, else with a fallback. Immutable.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        rules: Rules for query lengths of prefill passes.
    """

    def __init__(self, limits: BucketLimits, rules: PromptRules | None = None) -> None:
        self._limits = limits
        self._rules = rules or PromptRules()
        table = self.buckets(limits)
        self._table = BucketTable(table)
        if limits.unified:
            sizes = "[query, shared_blocks, unique_blocks, is_causal]"
            _log.info("Generated %d unified buckets %s: %s", len(table), sizes, _listed(table))
            return
        decode = "spec decode" if limits.max_draft_tokens else "decode"
        for phase, name in ((Phase.PREFILL, "prompt"), (Phase.DECODE, decode)):
            of_phase = [bucket for bucket in table if bucket.phase is phase]
            _log.info("Generated %d %s buckets [bs, query, num_blocks]: %s", len(of_phase), name, _listed(of_phase))

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the prepared bucket of least ``padded_cost`` that covers ``shape``, or a fallback. Pure."""
        return self._table.find(shape) or self.fallback(shape)

    def fallback(self, shape: Shape) -> Bucket:
        """Return a bucket that covers ``shape``, made for it. Pure."""
        return fallback_bucket(shape, self._limits, rules=self._rules)


def _listed(buckets: Sequence[Bucket]) -> str:
    """Return the sizes of buckets, those in the middle of a long list left out."""
    sizes = [_sizes(bucket) for bucket in buckets]
    if len(sizes) <= _MAX_LISTED:
        return str(sizes)
    half = _MAX_LISTED // 2
    return f"{str(sizes[:half])[:-1]}, ..., {str(sizes[-half:])[1:]}"


def _sizes(bucket: Bucket) -> tuple[int, ...]:
    if isinstance(bucket, UnifiedBucket):
        return bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, int(bucket.is_causal)
    return bucket.batch_size, bucket.query_len, bucket.num_blocks


def or_largest(
    buckets: Sequence[Bucket],
    limits: BucketLimits,
    phase: Phase,
    *,
    table: str = "",
    rules: PromptRules | None = None,
) -> tuple[Bucket, ...]:
    """Return ``buckets``, or the bucket that serves most of a phase alone if there are none. Pure.

    In prefill that is the longest query without context; in decode the largest batch with all it can read.

    Args:
        buckets: Buckets of one phase.
        limits: Limits of a shape.
        phase: Phase of the buckets.
        table: Name of the config table whose values left no bucket; empty if the limits alone did.
        rules: Rules for query lengths of prefill passes.

    Raises:
        ConfigValueError: There are none because of values in ``table``.
    """
    if buckets:
        return tuple(buckets)
    if table:
        raise ConfigValueError(
            f"[{table}] leaves no {phase.value} bucket: every combination of its sizes is outside the limits "
            f"(model.max_model_len = {limits.max_model_len}, engine.max_num_batched_tokens = "
            f"{limits.max_num_batched_tokens}, engine.max_num_seqs = {limits.max_num_seqs}).",
            hint="Lower the smallest sizes in the table, or raise the engine's limits.",
        )
    if phase is Phase.PREFILL:
        longest = limits.max_prefill_query_len
        return (Bucket(1, rules.rounded(longest) if rules else longest, 0, phase),)
    return (Bucket(limits.max_num_seqs, 1, max_decode_blocks(limits), phase),)
