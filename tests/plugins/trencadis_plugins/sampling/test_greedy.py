from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_testing.sampling import SamplingConformance


class TestGreedySampler(SamplingConformance):
    honours = frozenset({"logprobs"})

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
