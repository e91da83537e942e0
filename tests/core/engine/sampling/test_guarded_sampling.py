"""What the guard of samplers does not let pass, whatever stands in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trencadis.engine.sampling.guarded import GuardedSampler
from trencadis.interfaces import Sampled, Sampler, SamplingContext
from trencadis.records import RowStart, SamplingParams


class Plain(Sampler):
    """Greedy; honours what it is made with, and raises in its first call if it is made to."""

    def __init__(self, honours: frozenset[str], *, errs: bool = False) -> None:
        self.honours = honours
        self._errs = errs

    def check(self, params: SamplingParams) -> None:
        """Refuse nothing."""

    def allocate(self, **_: Any) -> None:
        """Need no room."""

    def start_row(self, start: RowStart) -> None:
        """Keep nothing."""

    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        if self._errs:
            raise ValueError("out of order")
        return Sampled(token_ids=logits.argmax(-1))


@pytest.mark.parametrize("honours", [frozenset(), frozenset({"greedy"}), frozenset({"greedy", "bad_token_ids"})])
def test_a_fallback_serves_what_it_says_that_it_honours_and_nothing_else(honours: frozenset[str]) -> None:
    """One that says nothing honours nothing: a list of banned tokens would have no effect."""
    known = frozenset({"greedy", "bad_token_ids"})
    guard = GuardedSampler("chosen", Plain(known, errs=True), lambda: Plain(honours))
    guard.allocate(num_rows=2, vocab_size=4, device=torch.device("cpu"))
    for row, params in enumerate([SamplingParams(), SamplingParams(temperature=0.0, bad_token_ids=(3,))]):
        tokens = np.array([1], np.int32)
        guard.start_row(RowStart(row=row, token_ids=tokens, num_prompt_tokens=1, params=params, seed=0))
    context = SamplingContext(rows=(0, 1), positions=(0, 0), tokens=torch.ones((2, 8), dtype=torch.int32))
    sampled = guard.sample(torch.zeros((2, 4)), context)
    refused = {error.index: error.message for error in sampled.row_errors}
    assert set(refused) == (set() if honours == known else {1})
    assert all("does not honour it" in message for message in refused.values())
