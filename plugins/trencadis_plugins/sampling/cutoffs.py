"""Epsilon and eta cutoffs: drop tokens below a probability, fixed or by entropy.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["EpsilonCutoff", "EtaCutoff"]


class EpsilonCutoff(RowProcessor):
    """Drops tokens whose probability is below ``epsilon_cutoff``; the most likely ones stay.

    Source: Hewitt, Manning, Liang, "Truncation sampling as language model desmoothing", 2022, section 3.2.
    """

    honours = frozenset({"epsilon_cutoff"})
    argmax_invariant = True
    example = ("epsilon_cutoff", 1e-6)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._cutoff = np.zeros(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the cutoff is on. Pure."""
        return start.params.epsilon_cutoff > 0

    def _take(self, start: RowStart) -> None:
        self._cutoff[start.row] = start.params.epsilon_cutoff

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        distribution = logits.double().softmax(-1)
        return _drop_below(logits, distribution, self._column(self._cutoff, context))


class EtaCutoff(RowProcessor):
    """Drops tokens whose probability is below min(eta, sqrt(eta) exp(-H)) with H the entropy in nats; the most likely ones stay.

    Source: Hewitt, Manning, Liang, "Truncation sampling as language model desmoothing", 2022, section 4.
    """

    honours = frozenset({"eta_cutoff"})
    argmax_invariant = True
    example = ("eta_cutoff", 1e-6)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._eta = np.zeros(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the cutoff is on. Pure."""
        return start.params.eta_cutoff > 0

    def _take(self, start: RowStart) -> None:
        self._eta[start.row] = start.params.eta_cutoff

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        distribution = logits.double().softmax(-1)
        entropy = torch.special.entr(distribution).sum(-1, keepdim=True)
        eta = self._column(self._eta, context)
        return _drop_below(logits, distribution, eta.minimum(eta.sqrt() * (-entropy).exp()))


def _drop_below(logits: torch.Tensor, distribution: torch.Tensor, cutoff: torch.Tensor) -> torch.Tensor:
    """Mask, in place, tokens below a cutoff ``[R, 1]``, except the most likely."""
    return logits.masked_fill_((distribution < cutoff) & (logits < logits.amax(-1, keepdim=True)), -torch.inf)
