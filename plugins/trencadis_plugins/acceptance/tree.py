"""Rejection sampling over several drafts after one token."""

from __future__ import annotations

import torch

from trencadis.interfaces import Verification
from trencadis_plugins.acceptance.drafted import (
    are_drawn,
    are_real,
    distribution_of,
    earlier_siblings,
    leftover,
    precise,
    ratios,
    target_at,
    target_of,
)
from trencadis_plugins.acceptance.token import Token
from trencadis_plugins.sampling.arithmetic import float_type

__all__ = ["Tree"]


class Tree(Token):
    """At each token the drafts after it are tried one after another, each against what those before it have left.

    With p the model's distribution and q that of the first draft: x_1 stands with probability min(1, p(x_1) / q(x_1)); if it does not, p
    becomes max(p - q, 0) and q loses x_1, both made distributions again, and x_2 is tried. If none stands, the token has the distribution that is left
    of p. Drafts that are certain have the distribution that gives everything to them; they take nothing from the distribution by which siblings are
    drawn. A chain is the case of one draft after each token.

    Source: Miao et al., "SpecInfer", 2024, section 4.3 (multi-round); drawn without replacement: Chen et al., "Sequoia", 2024,
    algorithm 2, and Jeon et al., "Recursive speculative decoding", 2024.
    """

    supports_trees = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return how likely each draft is the one of its siblings that stands, ``[B, N]``."""
        if verification.is_linear:
            return super().accept(verification)
        real, drawn_before = are_real(verification), _drawn_before(verification)
        left = target_of(verification).clone()
        untaken = torch.ones(left.shape[:2], dtype=float_type(left.device), device=left.device)
        shares = []
        for number in range(verification.tokens.shape[1]):
            node = verification.parents[:, number : number + 1]
            rows = node[:, :, None].expand(-1, 1, left.shape[2])
            target, distribution = left.gather(1, rows)[:, 0], _distribution(verification, number, drawn_before)
            token = verification.tokens[:, number : number + 1].clamp(min=0)
            stands = ratios(precise(target.gather(1, token)), precise(distribution.gather(1, token)))
            stands = torch.where(real[:, number : number + 1], stands, 0.0)
            before = untaken.gather(1, node)
            shares.append(before * stands)
            untaken = untaken.scatter(1, node, before * (1 - stands))
            left = left.scatter(1, rows, leftover(target, distribution)[:, None])
        return torch.cat(shares, dim=1)

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return what the drafts after the stop have left of the model's distribution there, ``[B, V]``."""
        if verification.is_linear:
            return super().last(verification, stops)
        real, drawn_before = are_real(verification), _drawn_before(verification)
        left = target_at(verification, stops)
        for number in range(verification.tokens.shape[1]):
            was_tried = (verification.parents[:, number] == stops) & real[:, number]
            left = torch.where(
                was_tried[:, None], leftover(left, _distribution(verification, number, drawn_before)), left
            )
        return left


def _drawn_before(verification: Verification) -> torch.Tensor:
    """Return which siblings of each draft were drawn before it, bool ``[B, N, N]``."""
    return earlier_siblings(verification) & are_drawn(verification)[:, None, :]


def _distribution(verification: Verification, number: int, drawn_before: torch.Tensor) -> torch.Tensor:
    drafts = torch.full_like(verification.num_drafts, number)
    return distribution_of(verification, drafts, drawn_before[:, number])
