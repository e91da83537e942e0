"""Min-p: drops tokens that are far less likely than the most likely one."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["MinP"]


class MinP(RowProcessor):
    """Drops tokens whose probability is below ``min_p`` times the largest one.

    In logits: x < x_max + ln(min_p), which needs no softmax.

    Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024, section 3.
    """

    honours = frozenset({"min_p"})
    argmax_invariant = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._log_share = np.zeros(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether min-p is on. Pure."""
        return start.params.min_p > 0

    def _take(self, start: RowStart) -> None:
        self._log_share[start.row] = np.log(start.params.min_p)

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        threshold = logits.amax(-1, keepdim=True).double() + self._column(self._log_share, context)
        return logits.masked_fill_(logits < threshold, -torch.inf)

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Compare every row with its threshold, minus infinity for rows without min-p."""
        threshold = logits.amax(-1, keepdim=True) + self._column_or(self._log_share, -np.inf, context)
        return logits.masked_fill_(logits < threshold, -torch.inf)
