"""Block verification: all drafts of a chain are verified together."""

from __future__ import annotations

import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_plugins.acceptance.drafted import (
    are_real,
    chances,
    distribution_of,
    leftover,
    precise,
    target_at,
    target_chances,
    target_of,
)

__all__ = ["Block"]


class Block(AcceptanceRule):
    """Accepts the longest run of drafts that passes a test of the whole run; never fewer in expectation than draft by draft.

    With the weights w_0 = 1, w_i = min(w_{i-1} p_i(d_i) / q_i(d_i), 1), the run of the first i of k drafts passes with probability
    h_i = s_i / (s_i + 1 - w_i), where s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0), and h_k = w_k. The step's last token after i
    drafts has the distribution max(w_i p_{i+1} - q_{i+1}, 0), after all of them p_{k+1}. Where verification takes one draft at a time, the
    chance that the longest run has at least i drafts is G_i = h_i + (1 - h_i) G_{i+1}, and draft i stands with G_i / G_{i-1}.

    Source: Sun et al., "Block verification accelerates speculative decoding", 2025, algorithm 2.
    """

    lossless = True
    needs_distributions = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return G_i / G_{i-1} of each draft, ``[B, N]``."""
        weights = _weights(verification)
        passes = _passes(verification, weights)
        reaches = [torch.zeros_like(weights[:, 0])]
        for number in range(passes.shape[1] - 1, -1, -1):
            reaches.append(passes[:, number] + (1 - passes[:, number]) * reaches[-1])
        at_least = torch.stack(reaches[:0:-1], dim=1)
        before = torch.cat([torch.ones_like(at_least[:, :1]), at_least[:, :-1]], dim=1)
        stands = torch.where(before > 0, at_least / before.clamp(min=torch.finfo(before.dtype).tiny), 0.0)
        return torch.where(are_real(verification), stands, 0.0)

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return max(w p - q, 0) after the run that passed, p after all drafts; ``[B, V]``."""
        weight = _weights(verification).gather(1, stops[:, None])
        # After the last draft the weight would scale the whole distribution, which need not be normalised.
        return leftover(target_at(verification, stops), distribution_of(verification, stops), weight)


def _weights(verification: Verification) -> torch.Tensor:
    """Return w_0 .. w_N, ``[B, N + 1]``."""
    target, drawn = target_chances(verification), chances(verification)
    weight = torch.ones_like(target[:, 0])
    weights = [weight]
    for number in range(target.shape[1]):
        of_one, by_drafter = target[:, number], drawn[:, number]
        raised = weight * of_one / by_drafter.clamp(min=torch.finfo(by_drafter.dtype).tiny)
        weight = torch.where(by_drafter > 0, raised.clamp(max=1.0), 0.0)
        weights.append(weight)
    return torch.stack(weights, dim=1)


def _passes(verification: Verification, weights: torch.Tensor) -> torch.Tensor:
    """Return h_1 .. h_N, ``[B, N]``; 0 for padding."""
    target, ends = target_of(verification), verification.num_drafts
    passes = []
    for number in range(1, weights.shape[1]):
        weight = weights[:, number]
        distribution = distribution_of(verification, torch.full_like(ends, number))
        excess = precise((target[:, number] * weight[:, None].to(target.dtype) - distribution).clamp(min=0.0).sum(-1))
        room = excess + 1 - weight
        # No room is left where both distributions agree and no weight was lost: then whatever follows stands, and so does this run.
        inner = torch.where(room > 0, excess / room.clamp(min=torch.finfo(room.dtype).tiny), 1.0)
        passes.append(torch.where(ends == number, weight, torch.where(ends > number, inner, 0.0)))
    return torch.stack(passes, dim=1)
