"""Sizes of steps, against a loop over their sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trencadis.records import Bucket, Pass, Phase, StepShape, step_shape


def _pass(rows, *, bucket=None):
    starts, lengths, logits = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Pass(
        bucket=bucket or Bucket(len(rows), int(lengths.max()), 1),
        indices=np.arange(len(rows), dtype=np.int32),
        rows=np.arange(len(rows), dtype=np.int32),
        starts=starts,
        query_lens=lengths,
        num_logits=logits,
        num_prompt_logits=np.zeros(len(rows), np.int32),
    )


_ROW = st.tuples(st.integers(0, 9000), st.integers(1, 9), st.booleans(), st.booleans()).map(
    lambda row: (row[0], row[1], (row[1] if row[3] else 1) if row[2] else 0)
)


@given(st.lists(st.lists(_ROW, min_size=1, max_size=6), max_size=3))
def test_sizes_are_those_that_a_loop_over_sequences_counts(passes):
    shape = step_shape([_pass(rows) for rows in passes], num_new=2)
    everything = [row for rows in passes for row in rows]
    prefills = [(start, length) for start, length, logits in everything if length > 1 and length != logits]
    decodes = [(start, length) for start, length, logits in everything if length == 1 or length == logits]
    assert shape == StepShape(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        num_decode_tokens=sum(length for _, length in decodes),
        num_prefill_tokens=sum(length for _, length in prefills),
        num_decode_context=sum(start + length for start, length in decodes),
        num_prefill_context=sum(start + length for start, length in prefills),
        prefill_products=float(sum(start + i + 1 for start, length in prefills for i in range(length))),
        num_new=2,
    )
    assert (shape.num_rows, shape.num_tokens) == (len(everything), sum(length for _, length, _ in everything))
    assert shape.num_context == sum(start + length for start, length, _ in everything)


def test_buckets_count_only_where_shapes_are_static():
    bucket = Bucket(4, 1, 8, Phase.DECODE)
    one = _pass([(5, 1, 1)], bucket=bucket)
    assert step_shape([one], has_buckets=True).buckets == (bucket,)
    assert step_shape([one]).buckets == ()
