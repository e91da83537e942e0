"""Typical acceptance: accepts drafts that the model finds plausible. Declared lossy."""

from __future__ import annotations

import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_plugins.acceptance.config import TypicalConfig
from trencadis_plugins.acceptance.drafted import (
    are_real,
    precise,
    target_at,
    target_chances,
    target_of,
)

__all__ = ["Typical"]


class Typical(AcceptanceRule):
    """A draft stands if the model's distribution gives it more than min(epsilon, delta * exp(-H)), H the distribution's entropy.

    The drafter's distribution does not matter, and text does not have the model's distribution: the likely tokens become likelier. Greedy rows,
    whose distribution is certain, lose nothing. Of several plausible drafts after one token the most likely stands, of equal ones the first.

    Args:
        config: Epsilon and delta.

    Source: Cai et al., "Medusa", 2024, section 2.3.1.
    """

    lossless = False
    needs_distributions = True
    supports_trees = True

    def __init__(self, config: TypicalConfig | None = None) -> None:
        config = config or TypicalConfig()
        self._epsilon, self._delta = config.epsilon, config.delta

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return 1 for drafts that are plausible, and 0 for others, ``[B, N]``."""
        entropy = precise(torch.special.entr(target_of(verification)).sum(-1))
        threshold = (self._delta * (-entropy).exp()).clamp(max=self._epsilon)
        chance = torch.where(are_real(verification), target_chances(verification), 0.0)
        stands = chance > threshold.gather(1, verification.parents)
        if not verification.is_linear:
            stands = stands & ~_has_better_sibling(verification, torch.where(stands, chance, 0.0))
        return stands.float()

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the model's distribution, ``[B, V]``."""
        return target_at(verification, stops)


def _has_better_sibling(verification: Verification, chance: torch.Tensor) -> torch.Tensor:
    """Return whether a draft after the same node has a larger chance, or the same and comes first; bool ``[B, N]``."""
    places = torch.arange(chance.shape[1], device=chance.device)
    is_sibling = verification.parents[:, :, None] == verification.parents[:, None, :]
    is_first = places[None, :] < places[:, None]
    mine, other = chance[:, :, None], chance[:, None, :]
    return (is_sibling & ((other > mine) | ((other == mine) & is_first))).any(-1)
