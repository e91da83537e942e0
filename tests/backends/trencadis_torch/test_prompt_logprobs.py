from __future__ import annotations

import math

import numpy as np
import torch

from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass
from trencadis_torch.prompt_logprobs import PromptPlan, score_prompt
from trencadis_torch.rows import Rows

PLAN = AllocationPlan(num_blocks=9, block_size=4, num_rows=3, max_model_len=40, max_num_batched_tokens=8)


def ints(*values):
    return np.array(values, np.int32)


def one_pass(num_prompt_logits):
    return Pass(
        bucket=Bucket(2, 4, 0),
        indices=ints(0, 3),
        rows=ints(2, 1),
        starts=ints(0, 6),
        query_lens=ints(3, 4),
        num_logits=ints(0, 0),
        num_prompt_logits=ints(*num_prompt_logits),
    )


def test_next_token_is_scored_at_each_position():
    rows = Rows(PLAN, torch.device("cpu"))
    rows.prompt_logprobs = [0, 2, 1]
    rows.tokens[2, 1], rows.tokens[1, 7:9] = 4, torch.tensor([0, 3]).int()
    plan = PromptPlan.of(one_pass((1, 2)), np.array([0, 3]), rows)
    assert plan.tokens.tolist() == [0, 3, 4]
    shares = [[0.1, 0.2, 0.3, 0.15, 0.25], [0.4, 0.3, 0.1, 0.1, 0.1], [0.05, 0.5, 0.2, 0.2, 0.05]]
    first, second, third = score_prompt(torch.tensor(shares).log() + 3, plan, rows).records()
    assert (first.index, first.position, first.token_id, first.rank, first.top_token_ids) == (0, 1, 4, 2, (2,))
    assert math.isclose(first.logprob, math.log(0.25), rel_tol=1e-5)
    assert (second.index, second.position, second.token_id, second.rank) == (3, 7, 0, 1)
    assert second.top_token_ids == (0, 1)
    assert math.isclose(second.top_logprobs[1], math.log(0.3), rel_tol=1e-5)
    assert (third.position, third.token_id, third.rank) == (8, 3, 2)


def test_many_positions_are_scored_slice_by_slice():
    rows = Rows(PLAN, torch.device("cpu"))
    one = one_pass((3, 4))
    plan = PromptPlan.of(one, np.array([0, 3]), rows)
    plan = PromptPlan(**{name: np.tile(getattr(plan, name), 20) for name in plan.__slots__ if name != "__weakref__"})
    logits = torch.randn(140, 7, generator=torch.Generator().manual_seed(0))
    found = score_prompt(logits, plan, rows)
    torch.testing.assert_close(found.logprobs, logits.log_softmax(-1)[:, 0])
    assert found.top_token_ids.shape == (140, 0)


def test_nothing_is_planned_if_nobody_asked():
    assert PromptPlan.of(one_pass((0, 0)), np.array([0, 3]), Rows(PLAN, torch.device("cpu"))) is None
