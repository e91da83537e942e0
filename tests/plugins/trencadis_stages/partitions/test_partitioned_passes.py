"""Passes whose sequences are spread over ranks: in every dimension as large as the largest part of a rank, and no larger."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.guard import Guarded
from trencadis.engine.sequences import SequenceTable
from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import BucketLimits, Int32Array, Plan, UnifiedBucket
from trencadis_stages.partitions.partitioned_passes import PartitionedPassPlanner
from trencadis_testing.engines import ExactShapes

RANKS, ROWS, BLOCKS = 3, 4, 40
"""Ranks, and rows and blocks of each."""


def planner(kind: type[PassPlanner], layout: str, contiguous: bool, **sizes: int) -> PassPlanner:
    capabilities = BackendCapabilities(
        layout=layout, default_block_size=4, max_prefill_batch_size=2, contiguous=contiguous
    )
    limits = BucketLimits(
        block_size=4,
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_prefill_batch_size=2,
        num_blocks=BLOCKS,
        contiguous=contiguous,
        prefix_caching=True,
        max_draft_tokens=0,
    )
    bucketing: Any = Guarded(BucketingStrategy, "b", ExactShapes())
    return kind(bucketing, capabilities=capabilities, table=SequenceTable(), limits=limits, **sizes)


def plan_of(rows: Int32Array, starts: Int32Array, counts: Int32Array) -> Plan:
    number = len(rows)
    none = np.empty(0, np.int32)
    return Plan(
        step=0,
        slots=np.arange(number, dtype=np.int32),
        rows=rows,
        epochs=np.zeros(number, np.int64),
        starts=starts,
        num_scheduled=counts,
        samples=np.ones(number, np.bool_),
        admitted=none,
        preempted=none,
    )


@pytest.mark.parametrize(("layout", "contiguous"), [("padded", False), ("padded", True), ("unified", False)])
def test_a_bucket_is_the_largest_of_those_that_ranks_would_choose_for_their_parts(
    layout: str, contiguous: bool
) -> None:
    draw = random.Random(1)
    whole = planner(
        PartitionedPassPlanner,
        layout,
        contiguous,
        num_partitions=RANKS,
    )
    alone = planner(PassPlanner, layout, contiguous)
    for _ in range(60):
        rows = np.array(sorted(draw.sample(range(RANKS * ROWS), draw.randint(1, 8))), np.int32)
        is_prefill = [draw.random() < 0.3 for _ in rows]
        counts = np.array([draw.randint(2, 9) if one else 1 for one in is_prefill], np.int32)
        starts = np.array([draw.choice([0, 4, 5]) if one else draw.randint(1, 30) for one in is_prefill], np.int32)
        own = np.array([draw.sample(range(BLOCKS), 10) for _ in range(RANKS * ROWS)], np.int32)
        tables = own + np.arange(RANKS * ROWS, dtype=np.int32)[:, None] // ROWS * BLOCKS
        passes = whole.passes(plan_of(rows, starts, counts), tables)
        found = np.concatenate([one.indices for one in passes])
        assert sorted(found.tolist()) == list(range(len(rows)))
        for one in passes:
            parts = []
            for rank in range(RANKS):
                there = one.rows // ROWS == rank
                if there.any():
                    part = plan_of(one.rows[there] % ROWS, one.starts[there], one.query_lens[there])
                    own_passes = alone.passes(part, own[rank * ROWS : rank * ROWS + ROWS])
                    assert len(own_passes) == 1, "a rank's part is one pass"
                    parts.append(own_passes[0].bucket)
            names = ["batch_size", "query_len", "num_blocks"]
            names += ["num_unique_blocks", "is_causal"] if isinstance(one.bucket, UnifiedBucket) else []
            for name in names:
                assert getattr(one.bucket, name) == max(getattr(bucket, name) for bucket in parts), name


def test_positions_of_a_decode_pass_are_counted_over_all_ranks() -> None:
    assert planner(PartitionedPassPlanner, "padded", False, num_partitions=RANKS).padded_tokens(7, 2) == RANKS * 3 * 2
