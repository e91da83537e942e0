from __future__ import annotations

import numpy as np
import pytest
from paged_scene import make_pass

from trencadis.records import Bucket, Phase, UnifiedShape
from trencadis_gaudi.dummy_batches import (
    DummySequence,
    dummy_decode,
    dummy_merged_prefill,
    dummy_prefill,
    dummy_unified,
)
from trencadis_gaudi.passes.unified_blocks import unified_batch


@pytest.mark.parametrize(
    ("batch_size", "num_blocks", "max_model_len", "lengths"),
    [(4, 12, 1024, [383] * 4), (3, 8, 4096, [383, 383, 255]), (4, 34, 1024, [1023] * 4)],
)
def test_gathered_blocks_are_dealt_out_as_the_vendor_does(batch_size, num_blocks, max_model_len, lengths):
    found = dummy_decode(
        Bucket(batch_size, 1, num_blocks, Phase.DECODE),
        block_size=128,
        max_model_len=max_model_len,
        num_blocks=5781,
        contiguous=False,
    )
    assert [one.context_len for one in found] == lengths
    assert sum(len(one.blocks) for one in found) == num_blocks
    assert {block for one in found for block in one.blocks} == {0}


@pytest.mark.parametrize(("num_blocks", "block"), [(24, 23), (5781, 5780), (6000, 5780)])
def test_range_is_filled_by_one_block_id(num_blocks, block):
    found = dummy_decode(
        Bucket(4, 1, num_blocks, Phase.DECODE), block_size=128, max_model_len=1024, num_blocks=5781, contiguous=True
    )
    assert found == (DummySequence(127, 1, (block,)),) * 4


def test_range_of_a_window_is_as_long_as_the_window():
    (found,) = dummy_decode(
        Bucket(1, 1, 9, Phase.DECODE), block_size=128, max_model_len=4096, num_blocks=50, contiguous=True, window=512
    )
    assert found == DummySequence(5 * 128 - 1, 1, (8,) * 5)


@pytest.mark.parametrize(
    ("bucket", "context_len"), [(Bucket(2, 256, 3), 384), (Bucket(2, 256, 7), 768), (Bucket(1, 1024, 2), 0)]
)
def test_context_of_a_prefill_is_cut_to_the_models_length(bucket, context_len):
    found = dummy_prefill(bucket, block_size=128, max_model_len=1024)
    assert len(found) == bucket.batch_size
    assert set(found) == {DummySequence(context_len, bucket.query_len, (0,) * (context_len // 128))}


def test_merged_prefill_is_dealt_out_evenly():
    found = dummy_merged_prefill(Bucket(1, 514, 6), block_size=128, max_model_len=1024, num_sequences=4)
    assert [(one.query_len, one.context_len) for one in found] == [(129, 256), (129, 256), (128, 128), (128, 128)]
    assert len(dummy_merged_prefill(Bucket(1, 3, 0), block_size=128, max_model_len=1024, num_sequences=8)) == 3


@pytest.mark.parametrize(
    "shape",
    [
        UnifiedShape(512, 6, 40, True),
        UnifiedShape(512, 0, 9, True),
        UnifiedShape(64, 12, 0, True),
        UnifiedShape(64, 12, 5, True),
        UnifiedShape(8, 5, 30, False),
        UnifiedShape(2, 1, 2, False),
        UnifiedShape(4, 0, 30, False),
    ],
)
def test_dummy_unified_batch_needs_exactly_its_bucket(shape):
    found = dummy_unified(shape, block_size=16, max_model_len=1024, num_sequences=8)
    tables = np.zeros((len(found), max(len(one.blocks) for one in found) + 40), np.int32)
    for row, one in enumerate(found):
        tables[row, : len(one.blocks)] = one.blocks
    starts, lengths = [one.context_len for one in found], [one.query_len for one in found]
    batch = unified_batch(make_pass(Bucket(1, 1, 0), range(len(found)), starts, lengths), tables, block_size=16)
    assert batch.shape == shape
