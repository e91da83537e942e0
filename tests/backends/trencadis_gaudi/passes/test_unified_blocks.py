from __future__ import annotations

import numpy as np

from support.backends.paged_scene import make_pass
from trencadis.records import Bucket, UnifiedShape
from trencadis_gaudi.passes.unified import cached_tokens, unified_batch

NO_BUCKET = Bucket(1, 1, 0)


def ints(*values):
    return np.array(values, np.int32)


def test_blocks_of_the_worked_example():
    """Blocks of four tokens; two decodes that share block 7, and a prompt chunk of three tokens behind block 9."""
    one = make_pass(NO_BUCKET, (0, 1, 2), (5, 6, 4), (1, 1, 3))
    cached = cached_tokens(one.starts, one.query_lens, ints(4, 5, 9))
    assert cached.tolist() == [6, 7, 4]
    batch = unified_batch(one, np.array([[7, 2], [7, 3], [9, 4]], np.int32), block_size=4, cached=cached)
    assert batch.shared.tolist() == [7, 9]
    assert batch.shared_columns.tolist() == [[0, -1], [0, -1], [-1, 0]]
    assert batch.unique.tolist() == [2, 3]
    assert batch.unique_groups.tolist() == [0, 1]
    usage = np.clip(batch.cached[batch.unique_groups] - batch.unique_columns * 4, 1, 4)
    assert usage.tolist() == [2, 3]
    assert batch.is_causal.tolist() == [False, False, True]
    assert batch.shape == UnifiedShape(5, 2, 4, True)


def test_sequence_with_several_new_tokens_is_taken_for_a_prompt():
    batch = unified_batch(
        make_pass(NO_BUCKET, (0, 1), (4, 4), (1, 2)), np.array([[1, 2], [3, 4]], np.int32), block_size=4
    )
    assert batch.cached.tolist() == [5, 4]
    assert batch.unique.tolist() == [1, 2]
    assert batch.shared.tolist() == [3]


def test_last_token_of_a_prompt_reads_only_what_was_computed_before():
    assert cached_tokens(ints(4, 5), ints(1, 1), ints(5, 5)).tolist() == [4, 6]


def test_pass_without_sequences_needs_nothing():
    batch = unified_batch(make_pass(NO_BUCKET, (), (), ()), np.zeros((2, 2), np.int32), block_size=4)
    assert batch.shape == UnifiedShape(0, 0, 0, False)
