"""One phase as a problem of choosing: shapes that ran, buckets that could exist, and the largest that must.

Sizes are thinned to a few well-placed ones in each dimension first; candidates are their combinations, and every shape is
rounded up to such a combination, which changes nothing: a candidate covers the one if and only if it covers the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from trencadis.records import BoolArray, Bucket, BucketLimits, FloatArray, Phase
from trencadis_gallery.bucketing.fitted_sizes import optimal_sizes
from trencadis_gallery.bucketing.workloads import DeviceCost, Workload
from trencadis_plugins.bucketing.fallback import max_decode_blocks

__all__ = ["Problem", "decode_problem", "prefill_problem"]

_Point = tuple[int, int, int]

_AXIS_SIZES = (8, 20, 10), (16, 2, 32)
"""Sizes of batch, query and blocks among candidates, prefill and decode: two to three times as fine as a table."""

_LINE_SIZES = 512
"""Sizes where only one dimension varies; also how finely a dimension is looked at before it is thinned."""


@attrs.frozen(eq=False)
class Problem:
    """Candidate buckets of one phase.

    Attributes:
        candidates: Buckets, without duplicates; those that must exist first.
        num_tops: How many must exist; together they cover every point.
        times: Seconds of a pass in each candidate, float64 [num_candidates].
        bytes: Memory of each candidate's graph, float64 [num_candidates].
        covers: Whether a candidate covers a point, bool [num_candidates, num_points].
        weights: How often each point ran, float64 [num_points].
        is_line: Candidates differ in one dimension only.
    """

    candidates: tuple[Bucket, ...]
    num_tops: int
    times: FloatArray
    bytes: FloatArray
    covers: BoolArray
    weights: FloatArray
    is_line: bool

    @classmethod
    def of(
        cls, points: Mapping[_Point, float], tops: Sequence[Bucket], others: Iterable[_Point], cost: DeviceCost
    ) -> Problem:
        """Return the problem of covering ``points`` by ``tops`` and some of ``others``. Pure."""
        phase = tops[0].phase
        more = sorted({Bucket(*sizes, phase) for sizes in others} - set(tops))
        candidates = (*tops, *more)
        sizes = np.array([(item.batch_size, item.query_len, item.num_blocks) for item in candidates])
        where = np.array(sorted(points), np.int64).reshape(-1, 3)
        return cls(
            candidates=candidates,
            num_tops=len(tops),
            times=np.array([cost.pass_s(item) for item in candidates]),
            bytes=np.array([cost.graph_bytes(item) for item in candidates], np.float64),
            covers=np.asarray((sizes[:, None, :] >= where[None, :, :]).all(axis=2), np.bool_),
            weights=np.array([points[point] for point in sorted(points)], np.float64),
            is_line=len(tops) == 1 and sum(len(set(axis)) > 1 for axis in sizes[1:].T.tolist()) <= 1,
        )


def prefill_problem(workload: Workload, limits: BucketLimits, cost: DeviceCost) -> Problem:
    """Return the choice of prefill buckets. Pure.

    Query lengths are multiples of a block, or the longest that a batch size leaves room for in the token budget. Shapes
    beyond the limits or the budget are left out.
    """
    longest, max_context = limits.max_prefill_query_len, limits.max_context_blocks
    corners = _staircase(limits.max_prefill_batch_size, longest, limits.max_num_batched_tokens)
    tops = [Bucket(batch_size, query_len, max_context, Phase.PREFILL) for batch_size, query_len in corners]
    queries = sorted({*range(limits.block_size, longest, limits.block_size), *(query_len for _, query_len in corners)})
    points: dict[_Point, float] = defaultdict(float)
    for item in workload.of_phase(Phase.PREFILL):
        shape = item.shape
        if shape.query_len <= longest and shape.num_blocks <= max_context:
            query_len = _up(queries, shape.query_len)
            if any(shape.batch_size <= batch and query_len <= query for batch, query in corners):
                points[shape.batch_size, query_len, shape.num_blocks] += item.count
    rounded, others = _thinned(points, tops, _AXIS_SIZES[0])
    legal = [sizes for sizes in others if sizes[0] * sizes[1] <= limits.max_num_batched_tokens]
    return Problem.of(rounded, tops, legal, cost)


def _staircase(max_batch: int, longest: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the largest batch sizes and query lengths within the token budget; none of them covers another. Pure."""
    corners: list[tuple[int, int]] = []
    for batch_size in range(min(max_batch, max_tokens), 0, -1):
        query_len = min(longest, max_tokens // batch_size)
        if not corners or query_len > corners[-1][1]:
            corners.append((batch_size, query_len))
    return corners


def decode_problem(workload: Workload, limits: BucketLimits, cost: DeviceCost, reserve_ratio: float) -> Problem:
    """Return the choice of decode buckets. Pure.

    How long requests are is a property of the traffic, but how many run together depends on the load of the moment, and
    a trace shows one. So every power of two of sequences and blocks is given a little weight.

    Args:
        workload: Shapes that ran; those beyond the limits are left out.
        limits: Limits of the engine.
        cost: Constants of the estimates.
        reserve_ratio: That weight, all together, against the weight of what ran.
    """
    max_batch, max_query = limits.max_num_seqs, 1 + limits.max_draft_tokens
    # Without contiguous blocks, shared prefixes let sequences read more blocks than there are; three times is enough.
    readable = max_decode_blocks(limits)
    max_blocks = readable if limits.contiguous else max(min(3 * limits.num_blocks, readable), max_batch)
    tops = [Bucket(max_batch, max_query, max_blocks, Phase.DECODE)]
    points: dict[_Point, float] = defaultdict(float)
    for item in workload.of_phase(Phase.DECODE):
        shape = item.shape
        legal = shape.num_blocks <= min(max_blocks, _max_blocks(shape.batch_size, limits))
        if legal and shape.batch_size <= max_batch and shape.query_len <= max_query:
            points[shape.batch_size, 1 if shape.query_len == 1 else max_query, shape.num_blocks] += item.count
    reserve = list(_reserve(max_batch, max_blocks, limits))
    share = reserve_ratio * sum(points.values()) / len(reserve)
    query_len = max((point[1] for point in points), default=1)
    for batch_size, num_blocks in reserve if share else ():
        points[batch_size, query_len, num_blocks] += share
    rounded, others = _thinned(points, tops, _AXIS_SIZES[1])
    cut: dict[_Point, float] = defaultdict(float)
    for sizes, weight in rounded.items():
        cut[_cut(sizes, limits)] += weight
    legal_others = [_cut(sizes, limits) for sizes in others if limits.contiguous or sizes[0] <= sizes[2]]
    return Problem.of(cut, tops, legal_others, cost)


def _max_blocks(batch_size: int, limits: BucketLimits) -> int:
    """Return the most blocks that so many sequences can read."""
    return limits.num_blocks if limits.contiguous else batch_size * limits.max_blocks_per_sequence


def _cut(sizes: _Point, limits: BucketLimits) -> _Point:
    """Return sizes without the blocks that rounding added beyond what their sequences can have."""
    return sizes[0], sizes[1], min(sizes[2], _max_blocks(sizes[0], limits))


def _reserve(max_batch: int, max_blocks: int, limits: BucketLimits) -> Iterable[tuple[int, int]]:
    """Yield powers of two of sequences, and of blocks that as many can read."""
    for batch_size in _powers(1, max_batch):
        for num_blocks in _powers(batch_size, min(max_blocks, _max_blocks(batch_size, limits))):
            yield batch_size, num_blocks


def _powers(low: int, high: int) -> Iterable[int]:
    while low < high:
        yield low
        low *= 2
    yield high


def _thinned(
    points: Mapping[_Point, float], tops: Sequence[Bucket], num_sizes: tuple[int, int, int]
) -> tuple[dict[_Point, float], list[_Point]]:
    """Return the points, rounded up to a few sizes in each dimension, and all combinations of these sizes."""
    varying = sum(len({point[axis] for point in points}) > 1 for axis in range(3))
    forced = [(top.batch_size, top.query_len, top.num_blocks) for top in tops]
    axes: list[list[int]] = []
    for axis in range(3):
        weights: dict[int, float] = defaultdict(float)
        for point, weight in points.items():
            weights[point[axis]] += weight
        most = _LINE_SIZES if varying == 1 else num_sizes[axis]
        axes.append(sorted({*_axis(weights, most), *(top[axis] for top in forced)}))
    rounded: dict[_Point, float] = defaultdict(float)
    for (batch_size, query_len, num_blocks), weight in points.items():
        sizes = _up(axes[0], batch_size), _up(axes[1], query_len), _up(axes[2], num_blocks)
        rounded[sizes] += weight
    used = [sorted({point[axis] for point in rounded}) for axis in range(3)]
    others = [(batch, query, blocks) for batch in used[0] for query in used[1] for blocks in used[2]]
    return rounded, others


def _up(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _axis(weights: Mapping[int, float], most: int) -> list[int]:
    """Return at most ``most`` sizes of one dimension, best for the weights that each has."""
    if not weights:
        return []
    step = -(-max(*weights, 1) // _LINE_SIZES)
    coarse: dict[int, float] = defaultdict(float)
    for size, weight in weights.items():
        coarse[min(-(-size // step) * step, max(weights))] += weight
    sizes = sorted(coarse)
    return [sizes[place] for place in optimal_sizes(sizes, [coarse[size] for size in sizes], most)]
