"""Acceptance by given rates, whatever the drafts are. For measurements only."""

from __future__ import annotations

import logging

import numpy as np
import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_gallery.config import SyntheticConfig
from trencadis_plugins.acceptance.drafted import are_real
from trencadis_plugins.sampling.arithmetic import tensor_on

__all__ = ["Synthetic"]

_log = logging.getLogger("trencadis.acceptance")


class Synthetic(AcceptanceRule):
    """The draft at a place stands with the rate of its place: steps are as long as one wants, and text is wrong.

    With it the time of speculation can be measured for an acceptance that no drafter at hand reaches.

    Args:
        config: The rates, or the mean length of a step.
    """

    lossless = False

    def __init__(self, config: SyntheticConfig | None = None) -> None:
        self._rates = (config or SyntheticConfig()).place_rates()
        _log.warning(
            "acceptance rule synthetic: drafts stand by given rates (%s), whatever the model says. The text is wrong; measure "
            "with it, and serve nobody.",
            ", ".join(f"{rate:g}" for rate in self._rates),
        )

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return the rate of each draft's place, ``[B, N]``."""
        real = are_real(verification)
        # The last rate is that of all places after it.
        rates = (list(self._rates) + [self._rates[-1]] * real.shape[1])[: real.shape[1]]
        by_place = tensor_on(np.array(rates), real.device)
        return torch.where(real, by_place, 0.0)
