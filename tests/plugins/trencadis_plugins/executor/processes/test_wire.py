from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.records import (
    Batch,
    Bucket,
    ConnectorReport,
    DraftDistributions,
    Drafts,
    Pass,
    Phase,
    RowError,
    RowStart,
    SamplingParams,
    StepOutput,
    TableWrites,
    TokenLogprobs,
    UnifiedBucket,
)
from trencadis_plugins.executor.ranks.wire import decode_batch, decode_output, encode_batch, encode_output

sizes = st.integers(0, 5)
buckets = st.one_of(
    st.builds(Bucket, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.sampled_from(Phase)),
    st.builds(UnifiedBucket, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.booleans()),
)


def int32s(draw, length):
    return np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length)), np.int32)


@st.composite
def batches(draw):
    def one_pass():
        length = draw(sizes)
        names = ("indices", "rows", "starts", "query_lens", "num_logits", "num_prompt_logits")
        return Pass(bucket=draw(buckets), **{name: int32s(draw, length) for name in names})

    def drafts():
        num_drafts = draw(sizes)
        rows, has_laws = int32s(draw, num_drafts), draw(st.booleans())
        return Drafts(
            num_drafts=int32s(draw, draw(sizes)),
            token_ids=int32s(draw, num_drafts),
            parents=int32s(draw, num_drafts) if draw(st.booleans()) else None,
            distributions=DraftDistributions(rows=rows, probabilities=torch.rand(2, 3)) if has_laws else None,
        )

    start = RowStart(
        row=draw(sizes),
        token_ids=int32s(draw, draw(sizes)),
        num_prompt_tokens=draw(sizes),
        params=SamplingParams(temperature=0.5, stop=("x",), logit_bias={3: 1.0}),
        seed=draw(st.integers(0, 2**64 - 1)),
        eos_token_ids=(1, 2),
    )
    num_writes = draw(sizes)
    return Batch(
        step=draw(st.integers(0, 2**40)),
        num_sequences=draw(sizes),
        row_starts=(start,) * draw(st.integers(0, 2)),
        table_writes=TableWrites(**{name: int32s(draw, num_writes) for name in ("rows", "columns", "block_ids")}),
        passes=tuple(one_pass() for _ in range(draw(st.integers(0, 3)))),
        drafts=drafts() if draw(st.booleans()) else None,
        start_token_ids=int32s(draw, draw(sizes)),
        connector_message=draw(st.binary(max_size=9)),
    )


@given(batches())
def test_a_batch_comes_as_it_was_sent(batch):
    assert repr(decode_batch(encode_batch(batch))) == repr(batch)


def test_arrays_of_another_type_are_no_batch():
    none = np.empty(0, np.int32)
    writes = TableWrites(rows=np.array([0.5]), columns=none, block_ids=none)
    with pytest.raises(TypeError):
        encode_batch(Batch(step=0, num_sequences=0, row_starts=(), table_writes=writes, passes=()))


@pytest.mark.parametrize("report", [None, ConnectorReport(loaded=(3,))])
@pytest.mark.parametrize(
    "output",
    [
        StepOutput(token_ids=np.array([5, 6], np.int32), num_emitted=np.array([2], np.int32)),
        StepOutput(
            token_ids=np.empty(0, np.int32),
            num_emitted=np.empty(0, np.int32),
            logprobs=(TokenLogprobs(index=0, position=3, token_id=5, logprob=-0.5, rank=1, top_token_ids=(5,)),),
            num_padded_tokens=7,
            device_s=0.25,
            num_compilations=1,
            missed_layers=True,
            row_errors=(RowError(index=0, message="no"),),
            step=9,
        ),
    ],
)
def test_an_output_comes_as_it_was_sent_with_the_report(output, report):
    assert repr(decode_output(encode_output(output, report))) == repr((output, report))
