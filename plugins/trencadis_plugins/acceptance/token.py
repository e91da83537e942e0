"""Rejection sampling, draft by draft."""

from __future__ import annotations

import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_plugins.acceptance.drafted import (
    are_real,
    chances,
    distribution_of,
    leftover,
    ratios,
    target_at,
    target_chances,
)

__all__ = ["Token"]


class Token(AcceptanceRule):
    """A draft stands with probability min(1, p / q); after the first that does not, the token has the distribution max(p - q, 0).

    p is the model's distribution, q that by which the drafter drew. Together the two give p, whatever q is:
    min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p. Drafts stand with probability sum min(p, q); certain ones,
    whose q is 1, with p.

    Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", 2023, algorithm 1; Chen et al.,
    "Accelerating large language model decoding with speculative sampling", 2023, algorithm 2.
    """

    lossless = True
    needs_distributions = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return min(1, p / q) of each draft, ``[B, N]``."""
        stands = ratios(target_chances(verification), chances(verification))
        return torch.where(are_real(verification), stands, 0.0)

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return max(p - q, 0) where a draft was refused, p after the last draft; ``[B, V]``."""
        # Of a chain, the draft after node i is draft i: after the last node there is none, and nothing is taken away.
        return leftover(target_at(verification, stops), distribution_of(verification, stops))
