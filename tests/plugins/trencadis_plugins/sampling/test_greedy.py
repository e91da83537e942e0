from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_testing.sampling import SamplingConformance


class TestGreedySampler(SamplingConformance):
    def make(self) -> GreedySampler:
        return GreedySampler()

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)


def test_it_takes_the_most_likely_token_whatever_the_request_asks_for():
    sampler = GreedySampler()
    sampler.allocate(num_rows=1, vocab_size=4, device=torch.device("cpu"))
    params = SamplingParams(temperature=5.0, bad_token_ids=(2,), logit_bias={0: 50.0})
    sampler.start_row(
        RowStart(row=0, token_ids=np.array([1], dtype=np.int32), num_prompt_tokens=1, params=params, seed=3)
    )
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]], dtype=torch.bfloat16)
    context = SamplingContext(rows=(0,), positions=(0,), tokens=torch.ones((1, 9), dtype=torch.int32))
    assert sampler.sample(logits, context).token_ids.tolist() == [2]


@pytest.mark.parametrize("is_static", [False, True])
def test_a_rule_is_shown_certain_distributions_and_its_tokens_are_reported(is_static):
    sampler = GreedySampler()
    if is_static:
        sampler.use_static_shapes()
    sampler.allocate(num_rows=1, vocab_size=4, device=torch.device("cpu"))
    params = SamplingParams(temperature=5.0, logprobs=1)
    sampler.start_row(
        RowStart(row=0, token_ids=np.array([1], dtype=np.int32), num_prompt_tokens=1, params=params, seed=3)
    )
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0], [3.0, 1.0, 2.0, 2.0]], dtype=torch.bfloat16)
    context = SamplingContext(rows=(0, 0), positions=(0, 1), tokens=torch.ones((1, 9), dtype=torch.int32))
    seen = []
    answer = sampler.verify(
        logits, context, lambda distributions: seen.append(distributions.probabilities) or torch.tensor([2, 1])
    )
    assert seen[0].tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert answer.token_ids.tolist() == [2, 1]
    assert [entry.token_id for entry in answer.logprobs] == [2, 1]
    assert sampler.supports_drafts(params, branching=True)


def test_first_token_may_come_from_another_engine_whatever_is_asked_for():
    assert GreedySampler().is_portable(SamplingParams(mirostat_mode=2))
