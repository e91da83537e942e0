from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import AllocationPlan
from trencadis.records import Batch, Bucket, Drafts, Pass, RowStart, SamplingParams, TableWrites
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.rows import DRAFT_MARGIN, Rows, drafts_of

PLAN = AllocationPlan(num_blocks=20, block_size=4, num_rows=3, max_model_len=10, max_num_batched_tokens=8)


def ints(*values):
    return np.array(values, np.int32)


def batch(*, starts=(), writes=((), (), ()), passes=(), drafts=None):
    rows, columns, blocks = (ints(*part) for part in writes)
    table_writes = TableWrites(rows=rows, columns=columns, block_ids=blocks)
    return Batch(step=0, num_sequences=3, row_starts=starts, table_writes=table_writes, passes=passes, drafts=drafts)


def one_pass(indices, rows, starts, lengths):
    zeros = ints(*([0] * len(rows)))
    return Pass(
        bucket=Bucket(len(rows), max(lengths), 0),
        indices=ints(*indices),
        rows=ints(*rows),
        starts=ints(*starts),
        query_lens=ints(*lengths),
        num_logits=zeros,
        num_prompt_logits=zeros,
    )


def make():
    return Rows(PLAN, torch.device("cpu"))


class Recorder(ArgmaxSampler):
    def __init__(self):
        self.rows = []

    def start_row(self, start):
        self.rows.append(start.row)


def test_row_start_brings_tokens_and_tells_the_sampler():
    rows, sampler = make(), Recorder()
    start = RowStart(
        row=1, token_ids=ints(5, 6, 7), num_prompt_tokens=2, params=SamplingParams(prompt_logprobs=4), seed=0
    )
    rows.apply(batch(starts=(start,)), sampler)
    assert rows.tokens[1, :4].tolist() == [5, 6, 7, 0]
    assert rows.prompt_logprobs == [0, 4, 0]
    assert sampler.rows == [1]


def test_later_table_write_counts():
    rows = make()
    rows.apply(batch(writes=((0, 2, 0, 0), (1, 0, 1, 0), (7, 8, 9, 3))), Recorder())
    assert rows.tables[0, :2].tolist() == [3, 9]
    assert rows.tables[2, 0] == 8


def test_drafts_land_behind_the_known_tokens_of_every_pass():
    rows = make()
    drafts = Drafts(num_drafts=ints(2, 0, 1), token_ids=ints(11, 12, 13))
    passes = (one_pass([1], [0], [0], [4]), one_pass([0, 2], [2, 1], [5, 3], [3, 2]))
    rows.apply(batch(passes=passes, drafts=drafts), Recorder())
    assert rows.tokens[2, 5:9].tolist() == [0, 11, 12, 0]
    assert rows.tokens[1, 3:6].tolist() == [0, 13, 0]
    assert not rows.tokens[0].any()


def test_drafts_may_reach_behind_the_longest_sequence():
    rows = make()
    drafts = Drafts(num_drafts=ints(0, 0, 2), token_ids=ints(1, 2))
    rows.apply(batch(passes=(one_pass([2], [0], [9], [3]),), drafts=drafts), Recorder())
    assert rows.tokens[0, 10:12].tolist() == [1, 2]
    assert rows.history.shape == (3, 11)
    assert rows.tables.shape[1] * 4 >= 10 + DRAFT_MARGIN


def test_drafts_of_some_sequences_come_in_their_order():
    drafts = Drafts(num_drafts=ints(2, 0, 3, 1), token_ids=ints(1, 2, 3, 4, 5, 6))
    counts, tokens = drafts_of(drafts, ints(3, 2))
    assert (counts.tolist(), tokens.tolist()) == ([1, 3], [6, 3, 4, 5])
