"""Top-n-sigma: keeps tokens within n standard deviations of the largest logit."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["TopNSigma"]


class TopNSigma(RowProcessor):
    """Keeps x >= x_max - n sigma, with sigma the standard deviation of the logits that are not masked.

    Dividing the logits by a temperature changes both sides alike: what is kept does not depend on it.

    Source: Tang et al., "Top-n-sigma: not all logits are you need", 2024, algorithm 1; masked logits are left out as
    llama.cpp does.
    """

    honours = frozenset({"top_n_sigma"})
    argmax_invariant = True
    example = ("top_n_sigma", 3.0)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._num_sigmas = np.zeros(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether top-n-sigma is on. Pure."""
        return start.params.top_n_sigma > 0

    def _take(self, start: RowStart) -> None:
        self._num_sigmas[start.row] = start.params.top_n_sigma

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        is_known = logits > -torch.inf
        values = logits.double().masked_fill_(~is_known, 0.0)
        count = is_known.sum(-1, keepdim=True).clamp_(min=1)
        mean = values.sum(-1, keepdim=True) / count
        variance = (values - mean).square_().masked_fill_(~is_known, 0.0).sum(-1, keepdim=True) / count
        threshold = logits.amax(-1, keepdim=True) - self._column(self._num_sigmas, context) * variance.sqrt()
        return logits.masked_fill_(logits < threshold, -torch.inf)
