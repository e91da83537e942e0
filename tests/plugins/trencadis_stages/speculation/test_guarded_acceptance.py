"""What the guard of acceptance rules does not let pass, whatever stands in its place."""

from __future__ import annotations

import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_stages.speculation.acceptance import GuardedAcceptance


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
