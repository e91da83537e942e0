"""Functions on drafts for acceptance rules: padding, siblings, and the distributions that drafts were drawn from.

Chances and shares are float64, or float32 on a device without it, where one has a relative error of some 1e-7.

Shapes: B sequences, N most drafts of one of them, V vocabulary. Every function is pure, and none makes a table of ``[B, N, V]``.
"""

from __future__ import annotations

import torch

from trencadis.interfaces import Verification
from trencadis_plugins.sampling.arithmetic import float_type

__all__ = [
    "are_drawn",
    "are_real",
    "chances",
    "distribution_of",
    "earlier_siblings",
    "leftover",
    "precise",
    "ratios",
    "target_at",
    "target_chances",
    "target_of",
]


def target_of(verification: Verification) -> torch.Tensor:
    """Return the model's distributions, ``[B, N + 1, V]``.

    Raises:
        ValueError: The rule was not declared to need distributions.
    """
    if verification.target is None:
        raise ValueError(
            "this rule reads the model's distributions, which it was not given: it must declare needs_distributions = True"
        )
    return verification.target


def are_real(verification: Verification) -> torch.Tensor:
    """Return which drafts are no padding, bool ``[B, N]``."""
    places = torch.arange(verification.tokens.shape[1], device=verification.tokens.device)
    return places < verification.num_drafts[:, None]


def earlier_siblings(verification: Verification) -> torch.Tensor:
    """Return at [b, i, j] whether draft j comes before draft i, and after the same node; bool ``[B, N, N]``."""
    parents, real = verification.parents, are_real(verification)
    both = (parents[:, :, None] == parents[:, None, :]) & real[:, :, None] & real[:, None, :]
    return both.tril(-1)


def precise(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in the widest type of their device; see ``sampling/arithmetic.py``."""
    return numbers.to(float_type(numbers.device))


def target_chances(verification: Verification) -> torch.Tensor:
    """Return how likely the model makes each draft after the node before it, ``[B, N]``; of padding any number."""
    target = target_of(verification)
    places = verification.parents * target.shape[2] + verification.tokens.clamp(min=0)
    return precise(target.flatten(1).gather(1, places))


def are_drawn(verification: Verification) -> torch.Tensor:
    """Return which drafts were drawn from a distribution, bool ``[B, N]``: the others are deterministic."""
    proposal = verification.proposal
    if proposal is None:
        return torch.zeros_like(verification.tokens, dtype=torch.bool)
    return proposal.amax(-1) > 0


def chances(verification: Verification) -> torch.Tensor:
    """Return how likely the drafter was to draw each draft, ``[B, N]``: 1 where it made no draw.

    Of a draft after siblings that is the chance of a first draw: see :func:`distribution_of`.
    """
    proposal = verification.proposal
    if proposal is None:
        device = verification.tokens.device
        return torch.ones(verification.tokens.shape, dtype=float_type(device), device=device)
    drawn = precise(proposal.gather(2, verification.tokens.clamp(min=0)[:, :, None])[:, :, 0])
    return torch.where(are_drawn(verification), drawn, 1.0)


def ratios(target: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return min(1, target / drawn); 0 where ``drawn`` is 0, for such a draft cannot have been drawn as was said."""
    return torch.where(drawn > 0, (target / drawn.clamp(min=torch.finfo(drawn.dtype).tiny)).clamp(max=1.0), 0.0)


def target_at(verification: Verification, nodes: torch.Tensor) -> torch.Tensor:
    """Return the model's distribution at one node of each sequence, ``[B, V]``.

    Args:
        verification: The drafts.
        nodes: int64 ``[B]``, 0 .. N.
    """
    target = target_of(verification)
    return target.gather(1, nodes[:, None, None].expand(-1, 1, target.shape[2]))[:, 0]


def distribution_of(
    verification: Verification, drafts: torch.Tensor, drawn_before: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the distribution that one draft of each sequence was drawn from, ``[B, V]``; 0 everywhere for padding.

    A deterministic draft has a one-hot distribution. A draft after siblings was drawn without
    replacement: from the rest of the distribution after their draws.

    Args:
        verification: The drafts.
        drafts: Which, int64 ``[B]``, 0 .. N; N and whatever else is beyond a sequence's last is padding.
        drawn_before: Siblings that were drawn before it, bool ``[B, N]``; None: there are none.
    """
    tokens, proposal = verification.tokens.clamp(min=0), verification.proposal
    index = drafts.clamp(max=tokens.shape[1] - 1)[:, None]
    distribution = torch.zeros_like(target_of(verification)[:, 0]).scatter_(1, tokens.gather(1, index), 1.0)
    if proposal is not None:
        drawn = proposal.gather(1, index[:, :, None].expand(-1, 1, proposal.shape[2]))[:, 0].to(distribution.dtype)
        is_drawn = drawn.amax(-1, keepdim=True) > 0
        if drawn_before is not None:
            gone = torch.zeros_like(drawn).scatter_add_(1, tokens, drawn_before.to(drawn.dtype)) > 0
            # A distribution that nothing was taken from stays as it was recorded.
            left = _normalised(drawn.masked_fill(gone, 0.0))
            drawn = torch.where(gone.any(-1, keepdim=True), left, drawn)
        distribution = torch.where(is_drawn, drawn, distribution)
    return distribution * (drafts < verification.num_drafts)[:, None]


def leftover(target: torch.Tensor, drawn: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return max(weight * target - drawn, 0) as a distribution, ``[B, V]``; the target where nothing is left.

    Nothing is left where the two are equal: then no draft is refused, and the result is not used.

    Args:
        target: The model's distribution, ``[B, V]``.
        drawn: The drafter's, ``[B, V]``.
        weight: Weight of the target's distribution, ``[B, 1]``; None: 1.
    """
    scaled = target if weight is None else target * weight.to(target.dtype)
    left = (scaled - drawn).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, _normalised(left), target)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
