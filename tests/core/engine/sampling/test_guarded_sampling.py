"""What the guards of sampler and acceptance rule do not let pass, whatever stands in their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trencadis.engine.sampling.guarded import GuardedAcceptance, GuardedSampler
from trencadis.interfaces import AcceptanceRule, Sampled, Sampler, SamplingContext, Verification
from trencadis.records import RowStart, SamplingParams


class Lossy(AcceptanceRule):
    """Lets every draft stand, and every token follow with the same chance."""

    lossless = False
    needs_distributions = True

    def accept(self, verification: Verification) -> torch.Tensor:
        return torch.ones(verification.tokens.shape)

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        assert verification.target is not None
        return torch.ones(len(stops), verification.target.shape[2])


class OneToken(Lossy):
    """Gives all the weight to one token that the request has ruled out."""

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 0.0, 0.0, 1.0]])


def two_drafts() -> Verification:
    """Draft 1 is possible and draft 3 is masked; at the last node token 2 alone is left."""
    target = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]]])
    return Verification(
        tokens=torch.tensor([[1, 3]]),
        parents=torch.tensor([[0, 1]]),
        num_drafts=torch.tensor([2]),
        is_linear=True,
        target=target,
    )


def test_no_draft_stands_and_no_token_follows_that_the_request_has_ruled_out_under_a_lossy_rule() -> None:
    guard = GuardedAcceptance("lossy", Lossy())
    assert guard.accept(two_drafts()).tolist() == [[1.0, 0.0]]
    assert guard.last(two_drafts(), torch.tensor([1])).tolist() == [[1.0, 0.0, 1.0, 0.0]]
    assert guard.fault == ""


def test_a_lossy_rule_that_leaves_no_possible_token_errs() -> None:
    guard = GuardedAcceptance("one token", OneToken())
    assert guard.last(two_drafts(), torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert "last() gave weights that are not a distribution" in guard.fault


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
