from __future__ import annotations

import pytest

from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.runner import GaudiRunner, empty_pass


def runner(max_merged=0):
    return GaudiRunner(None, None, rows=None, tables=None, habana=None, max_merged=max_merged)


def test_pass_of_padding_has_the_shapes_of_its_bucket_and_no_sequence():
    one = empty_pass(Bucket(4, 1, 8, Phase.DECODE))
    assert one.bucket == Bucket(4, 1, 8, Phase.DECODE)
    assert len(one.rows) == len(one.indices) == len(one.num_logits) == 0


@pytest.mark.parametrize(("tokens", "rows"), [(2, 2), (64, 5)])
def test_unified_pass_samples_as_many_rows_as_it_may_have_sequences(tokens, rows):
    made = GaudiRunner(None, None, rows=None, tables=None, habana=None, max_num_seqs=5, max_steps=3)
    assert made.sampling_bucket(UnifiedBucket(tokens, 4, 9, True)) == Bucket(rows, 3, 0, Phase.DECODE)


@pytest.mark.parametrize(
    ("bucket", "rows"), [(Bucket(1, 128, 0), 4), (Bucket(8, 1, 9, Phase.DECODE), 8), (Bucket(1, 1, 9, Phase.DECODE), 1)]
)
def test_merged_prefill_samples_as_many_rows_as_it_may_have_prompts(bucket, rows):
    assert runner(max_merged=4).sampling_bucket(bucket).batch_size == rows
    assert runner().sampling_bucket(bucket) == bucket
