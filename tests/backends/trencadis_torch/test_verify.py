from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import AcceptanceRule, AllocationPlan, Sampled, SampledLogprobs, Sampler
from trencadis.records import Bucket, Drafts, Pass, Phase, UnifiedBucket
from trencadis_torch.rows import Rows
from trencadis_torch.verify import MatchingPrefix, SamplePlan, emit

PLAN = AllocationPlan(num_blocks=9, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=8)


def ints(*values):
    return np.array(values, np.int32)


def one_pass(*, num_logits, lengths, starts, phase=Phase.DECODE, bucket=None):
    count = len(num_logits)
    return Pass(
        bucket=bucket or Bucket(count, max(lengths), 9, phase),
        indices=np.arange(count, dtype=np.int32) + 1,
        rows=np.arange(count, dtype=np.int32)[::-1].copy(),
        starts=ints(*starts),
        query_lens=ints(*lengths),
        num_logits=ints(*num_logits),
        num_prompt_logits=ints(*([0] * count)),
    )


class Says(Sampler):
    """Chooses what a table by row and position says; reports a logprob for every logits row."""

    def __init__(self, table):
        self.table = table

    def allocate(self, **_):
        pass

    def start_row(self, start):
        pass

    def sample(self, logits, context):
        self.context = context
        tokens = [self.table[row][position] for row, position in zip(context.rows, context.positions, strict=True)]
        reports = tuple(
            SampledLogprobs(index=i, token_id=token, logprob=-1.0, rank=1, top_token_ids=(), top_logprobs=())
            for i, token in enumerate(tokens)
        )
        return Sampled(token_ids=torch.tensor(tokens), logprobs=reports)


# Row 2 verifies two drafts, row 1 none, row 0 is a chunk that is not the last.
PASS = one_pass(num_logits=(3, 1, 0), lengths=(3, 1, 2), starts=(5, 9, 0))
DRAFTS = Drafts(num_drafts=ints(0, 2, 0, 0), token_ids=ints(71, 72))


def run(one, table, drafts, *, padded=False, acceptance=None):
    rows = Rows(PLAN, torch.device("cpu"))
    size = one.bucket.query_len if padded else 0
    firsts = np.arange(len(one.rows)) * size if padded else np.cumsum(one.query_lens) - one.query_lens
    plan = SamplePlan.of(one, firsts, rows.history, padded=padded)
    sampler = Says(table)
    logits = torch.zeros(len(plan.tokens), 100)
    acceptance = acceptance or MatchingPrefix()
    found = emit(logits, plan, one, drafts=drafts, rows=rows, sampler=sampler, acceptance=acceptance)
    return found, rows, plan


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("chosen", "emitted"),
    [
        ({5: 71, 6: 72, 7: 73}, [71, 72, 73]),
        ({5: 71, 6: 80, 7: 73}, [71, 80]),
        ({5: 80, 6: 72, 7: 73}, [80]),
    ],
)
def test_drafts_stand_up_to_the_first_that_differs(chosen, emitted, padded):
    table = {2: chosen, 1: {9: 50}}
    one = PASS
    if padded:
        one = one_pass(num_logits=(3, 1, 0), lengths=(3, 1, 2), starts=(5, 9, 0), bucket=Bucket(5, 4, 9, Phase.DECODE))
    found, rows, _ = run(one, table, DRAFTS, padded=padded)
    assert found.indices.tolist() == [1, 2]
    assert found.num_emitted[:2].tolist() == [len(emitted), 1]
    assert found.token_ids[0, : len(emitted)].tolist() == emitted
    assert rows.tokens[2, 6 : 6 + len(emitted)].tolist() == emitted
    assert rows.tokens[1, 9:12].tolist() == [0, 50, 0]
    assert not rows.tokens[0].any()
    located = [(index, step, position, entry.token_id) for index, step, position, entry in found.logprobs]
    assert located == [(1, k, 6 + k, chosen[5 + k]) for k in range(3)] + [(2, 0, 10, 50)]


class TakesTwo(AcceptanceRule):
    lossless = False

    def accept(self, verification):
        v = verification
        self.seen = (v.sampled.tolist(), v.tokens.tolist(), v.num_drafts.tolist())
        return torch.ones(v.tokens.shape, dtype=torch.float64)


def test_given_rule_decides_and_accepted_drafts_are_emitted():
    rule = TakesTwo()
    found, rows, _ = run(PASS, {2: {5: 1, 6: 2, 7: 3}, 1: {9: 50}}, DRAFTS, acceptance=rule)
    assert rule.seen == ([[1, 2, 3], [50, 50, 50]], [[71, 72], [-1, -1]], [2, 0])
    assert found.num_emitted.tolist() == [3, 1]
    assert rows.tokens[2, 6:9].tolist() == [71, 72, 3]


def test_plain_step_emits_one_token_each():
    one = one_pass(num_logits=(1, 1), lengths=(1, 1), starts=(3, 4))
    found, rows, plan = run(one, {1: {3: 30}, 0: {4: 40}}, None)
    assert found.num_emitted is None
    assert found.token_ids.tolist() == [[30], [40]]
    assert (plan.context.rows, plan.context.positions) == ((1, 0), (3, 4))
    assert rows.tokens[1, 4] == 30
    assert rows.tokens[0, 5] == 40


def test_sampled_positions_are_the_last_of_each_sequence():
    one = one_pass(num_logits=(1, 0, 2), lengths=(4, 3, 5), starts=(0, 0, 6), phase=Phase.PREFILL)
    plan = SamplePlan.of(one, np.array([0, 4, 7]), torch.zeros(4, 41), padded=False)
    assert plan.tokens.tolist() == [3, 10, 11]
    assert plan.context.rows == (2, 0, 0)
    assert plan.context.positions == (3, 9, 10)


def test_nothing_is_sampled_if_no_sequence_emits():
    one = one_pass(num_logits=(0, 0), lengths=(4, 3), starts=(0, 0))
    assert SamplePlan.of(one, np.array([0, 4]), torch.zeros(4, 41), padded=False) is None


@pytest.mark.parametrize("bucket", [Bucket(1, 32, 4), UnifiedBucket(32, 2, 9, is_causal=True)])
@pytest.mark.parametrize(("steps", "size"), [(0, 4), (3, 12)])
def test_sequences_of_one_row_are_padded_to_as_many_as_it_may_hold(bucket, steps, size):
    for num_logits in ((1, 1), (1, 0), (0, 1)):
        one = one_pass(num_logits=num_logits, lengths=(2, 3), starts=(5, 9), bucket=bucket)
        history = torch.zeros(4, 41)
        plan = SamplePlan.of(one, np.array([0, 2]), history, padded=True, num_sequences=4, num_steps=steps)
        assert len(plan.tokens) == size
        assert plan.entries.shape == (4, max(1, steps))
        lasts = np.array([1, 4])  # of each sequence in the row
        assert plan.tokens[plan.entries[: len(plan.sequences), 0]].tolist() == lasts[plan.sequences].tolist()
        assert set(plan.context.rows) == {int(one.rows[sequence]) for sequence in plan.sequences}


@pytest.mark.parametrize(
    ("bucket", "size"), [(Bucket(4, 3, 9, Phase.DECODE), 12), (Bucket(4, 16, 2, Phase.PREFILL), 4)]
)
def test_number_of_padded_logits_rows_follows_from_the_bucket(bucket, size):
    for num_logits in ((1, 1), (1, 0)):
        one = one_pass(num_logits=num_logits, lengths=(2, 3), starts=(5, 9), bucket=bucket)
        plan = SamplePlan.of(one, np.arange(4) * bucket.query_len, torch.zeros(4, 41), padded=True)
        assert len(plan.tokens) == len(plan.context.rows) == size
