"""Sample and match: draw with the ordinary sampler at every draft, and accept drafts that equal the sampled token."""

from __future__ import annotations

import torch

from trencadis.interfaces import AcceptanceRule, Verification
from trencadis_plugins.acceptance.drafted import are_real, earlier_siblings

__all__ = ["Match"]


class Match(AcceptanceRule):
    """Drafts stand while the sampler chooses the very same tokens.

    The step emits nothing but sampled tokens, each drawn by the random numbers of its position: the text of a seeded request is
    that of no speculation, token for token, and every feature of the sampler works. A draft that is certain stands with the
    probability that the token has, as by rejection sampling; drafts drawn at random stand less often than they could.
    """

    lossless = True
    supports_trees = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return 1 where a draft is the token that was sampled at the node before it, else 0; of equal siblings 1 for the first."""
        if verification.sampled is None:
            raise ValueError("match is shown the sampled tokens: it needs no distributions")
        tokens = verification.tokens
        stands = (verification.sampled.gather(1, verification.parents) == tokens) & are_real(verification)
        if not verification.is_linear:
            twins = earlier_siblings(verification) & (tokens[:, :, None] == tokens[:, None, :])
            stands = stands & ~twins.any(-1)
        return stands.float()
