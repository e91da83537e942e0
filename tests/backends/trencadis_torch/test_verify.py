from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends.passes import ints, make_pass
from trencadis.interfaces import AcceptanceRule, AllocationPlan, Sampled, SampledLogprobs, Sampler, Verification
from trencadis.records import Bucket, Drafts, Phase, UnifiedBucket
from trencadis_torch.rows import Rows
from trencadis_torch.verify import MatchingPrefix, SamplePlan, emit, verify_drafts

PLAN = AllocationPlan(num_blocks=9, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=8)


def one_pass(*, num_logits, lengths, starts, phase=Phase.DECODE, bucket=None):
    count = len(num_logits)
    bucket = bucket or Bucket(count, max(lengths), 9, phase)
    return make_pass(bucket, range(count)[::-1], starts, lengths, num_logits, indices=range(1, count + 1))


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


def drafted(parents, *, num_drafts=None, is_linear=False, columns=None):
    rows, width = len(parents), columns or len(parents[0])
    counts = num_drafts or [len(row) for row in parents]
    padded = [list(row) + list(range(len(row), width)) for row in parents]
    return Verification(
        tokens=torch.arange(width).expand(rows, -1),
        parents=torch.tensor(padded),
        num_drafts=torch.tensor(counts),
        is_linear=is_linear,
    )


def walk(verification, accept, uniforms):
    verified = verify_drafts(
        verification, torch.tensor(accept, dtype=torch.float64), torch.tensor(uniforms, dtype=torch.float64)
    )
    paths = [row[:count] for row, count in zip(verified.nodes.tolist(), verified.num_accepted.tolist(), strict=True)]
    assert verified.nodes.shape == verification.tokens.shape
    return paths, verified.stops.tolist()


CHAIN = [0, 1, 2]


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize(
    ("uniforms", "path"),
    [
        ([0.49, 0.49, 0.49, 0.0], [1, 2, 3]),
        ([0.49, 0.49, 0.51, 0.0], [1, 2]),
        ([0.49, 0.51, 0.01, 0.0], [1]),
        ([0.51, 0.01, 0.01, 0.0], []),
        ([0.5, 0.01, 0.01, 0.0], []),
    ],
)
def test_a_chain_goes_on_while_numbers_are_below_the_shares(uniforms, path, is_linear):
    paths, stops = walk(drafted([CHAIN], is_linear=is_linear), [[0.5] * 3], [uniforms])
    assert paths == [path]
    assert stops == [len(path)]


@pytest.mark.parametrize("is_linear", [True, False])
def test_padding_is_not_walked_to_whatever_its_share(is_linear):
    asked = drafted([CHAIN] * 3, num_drafts=[3, 1, 0], is_linear=is_linear)
    paths, stops = walk(asked, [[1.0] * 3] * 3, [[0.3] * 4] * 3)
    assert paths == [[1, 2, 3], [1], []]
    assert stops == [3, 1, 0]


@pytest.mark.parametrize(
    ("number", "child"), [(0.1, 1), (0.19, 1), (0.2, 2), (0.49, 2), (0.51, 3), (0.89, 3), (0.9, None), (0.99, None)]
)
def test_siblings_have_their_shares_one_behind_another(number, child):
    paths, stops = walk(drafted([[0, 0, 0]]), [[0.2, 0.3, 0.4]], [[number, 0, 0, 0]])
    assert paths == [[] if child is None else [child]]
    assert stops == [child or 0]


def test_the_walk_goes_down_the_branch_that_it_took():
    # 0 ─ 1 ─ 3 ─ 5
    #   └ 2 ─ 4
    tree = [0, 0, 1, 2, 3]
    shares = [[0.5, 0.5, 0.5, 0.5, 0.5]] * 4
    numbers = [
        [0.1, 0.1, 0.9, 0.1, 0.9, 0.9],
        [0.7, 0.1, 0.1, 0.1, 0.1, 0.9],
        [0.7, 0.1, 0.9, 0.1, 0.1, 0.9],
        [0.1, 0.9, 0.1, 0.1, 0.1, 0.9],
    ]
    paths, stops = walk(drafted([tree] * 4), shares, numbers)
    assert paths == [[1, 3, 5], [2, 4], [2], [1]]
    assert stops == [5, 4, 2, 1]


def test_a_share_of_zero_is_never_taken_and_one_always():
    tree = drafted([[0, 0, 2]] * 2)
    smallest, largest = 2.0**-53, 1 - 2.0**-53
    paths, _ = walk(tree, [[0.0, 1.0, 1.0]] * 2, [[smallest] * 4, [largest] * 4])
    assert paths == [[2, 3], [2, 3]]


def test_frequencies_of_paths_are_products_of_shares():
    generator = torch.Generator().manual_seed(0)
    count, tree = 40_000, [0, 0, 1, 1]
    asked = drafted([tree] * count)
    shares = torch.tensor([[0.5, 0.2, 0.3, 0.6]]).double().expand(count, -1)
    verified = verify_drafts(asked, shares, torch.rand((count, 5), generator=generator, dtype=torch.float64))
    found = verified.stops.bincount(minlength=5) / count
    expected = torch.tensor([0.3, 0.5 * 0.1, 0.2, 0.15, 0.3])
    # Five standard deviations of a share of .3.
    assert (found - expected).abs().max() < 5 * (0.21 / count) ** 0.5


def test_matching_drafts_stand():
    asked = Verification(
        tokens=torch.tensor([[7, 8, 9]]),
        parents=torch.tensor([[0, 0, 2]]),
        num_drafts=torch.tensor([3]),
        is_linear=False,
        sampled=torch.tensor([[8, 9, 9, 9]]),
    )
    assert MatchingPrefix().accept(asked).tolist() == [[0, 1, 1]]
