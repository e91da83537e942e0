"""Passes of sequences that are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trencadis.engine.batching.passes import PassPlanner
from trencadis.records import BucketLimits, Int32Array, Int64Array, Phase, Shape, UnifiedShape

__all__ = ["PartitionedPassPlanner"]


class PartitionedPassPlanner(PassPlanner):
    """Splits plans whose sequences are spread over ranks: the shape of a pass is in every dimension the largest that a rank's part has.

    All ranks then run their parts in one bucket. A prefill pass has at most ``max_prefill_batch_size`` sequences of a rank.

    Args:
        num_partitions: Ranks with sequences of their own.
        limits: Sizes of each partition.
    """

    def __init__(self, *args: Any, num_partitions: int, limits: BucketLimits, **options: Any) -> None:
        super().__init__(*args, limits=limits, **options)
        self._num_partitions = num_partitions
        self._num_rows, self._num_blocks = limits.max_num_seqs, limits.num_blocks
        self._counts_blocks = False
        self._max_in_group = self._max_prefills * num_partitions

    def padded_tokens(self, num_sequences: int, query_len: int) -> int:
        """Return the token positions of a decode pass over so many sequences, as many on each rank."""
        return self._num_partitions * super().padded_tokens(-(-num_sequences // self._num_partitions), query_len)

    def _shape(
        self, starts: Int32Array, lengths: Int32Array, rows: Int32Array, phase: Phase, block_tables: Int32Array
    ) -> Shape:
        found = []
        for partition, there in self._parts(rows):
            mine = rows[there]
            if self._unified or self._contiguous:  # ids count: those of the rank itself
                tables, mine = block_tables[mine] - partition * self._num_blocks, np.arange(len(mine), dtype=np.int32)
            else:
                tables = block_tables
            found.append(super()._shape(starts[there], lengths[there], mine, phase, tables))
        return _largest(found)

    def _group_shape(self, starts: Int32Array, lengths: Int32Array, rows: Int32Array) -> Shape:
        return _largest([self._prefill_shape(starts[there], lengths[there]) for _, there in self._parts(rows)])

    def _parts(self, rows: Int32Array) -> Iterator[tuple[int, Int64Array]]:
        """Yield each partition with some of the rows, and which of them."""
        partitions = rows // self._num_rows
        for partition in range(self._num_partitions):
            there = np.flatnonzero(partitions == partition)
            if there.size:
                yield partition, there


def _largest(shapes: Sequence[Shape]) -> Shape:
    """Return the smallest shape that has room for each of some, of one kind and phase but for unified ones. Pure."""
    unified = [one for one in shapes if isinstance(one, UnifiedShape)]
    if unified:
        return UnifiedShape(
            query_len=max(one.query_len for one in unified),
            num_blocks=max(one.num_blocks for one in unified),
            num_unique_blocks=max(one.num_unique_blocks for one in unified),
            is_causal=any(one.is_causal for one in unified),
        )
    return Shape(
        max(one.batch_size for one in shapes),
        max(one.query_len for one in shapes),
        max(one.num_blocks for one in shapes),
        shapes[0].phase,
    )
