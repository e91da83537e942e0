from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from trencadis_gaudi.prompt_scores import NO_PROMPTS, padded_plan, score_padded
from trencadis_torch.prompt_logprobs import PromptPlan, score_prompt

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], dtype=torch.int32)
ROWS = SimpleNamespace(tokens=TOKENS)


def plan(*places, num_top=3):
    count = len(places)
    rows, positions, tokens = (np.array(column, np.int64) for column in zip(*places, strict=True))
    return PromptPlan(
        indices=np.arange(count), positions=positions, rows=rows, num_top=np.full(count, num_top), tokens=tokens
    )


def test_scores_are_those_without_padding():
    asked = plan((0, 1, 4), (1, 0, 2), (1, 3, 0))
    logits = torch.randn(7, 60, generator=torch.Generator().manual_seed(1))
    found = score_padded(logits, padded_plan(asked, 7), asked, ROWS)
    expected = score_prompt(logits[asked.tokens], asked, ROWS)
    assert found.records() == expected.records()


def test_shapes_do_not_depend_on_what_is_asked_for():
    logits = torch.randn(70, 60)
    found = [
        score_padded(logits, padded_plan(one, 70), one, ROWS)
        for one in (NO_PROMPTS, plan((0, 0, 0), num_top=0), plan((0, 1, 4), (1, 2, 9)))
    ]
    names = ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    assert len({tuple(getattr(one, name).shape for name in names) for one in found}) == 1
    assert [len(one.records()) for one in found] == [0, 1, 2]


def test_vocabulary_may_be_smaller_than_the_most_alternatives():
    asked = plan((0, 1, 1))
    found = score_padded(torch.randn(2, 7), padded_plan(asked, 2), asked, ROWS)
    assert found.top_token_ids.shape == (2, 7)
