"""Temperature scaling."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["Temperature"]


class Temperature(RowProcessor):
    """Divides the logits by the temperature; greedy rows are left out."""

    honours = frozenset({"temperature"})
    argmax_invariant = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._temperature = np.ones(num_rows, dtype=np.float32)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the temperature is neither greedy nor 1. Pure."""
        return not start.params.is_greedy and start.params.temperature != 1

    def _take(self, start: RowStart) -> None:
        self._temperature[start.row] = start.params.temperature

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return logits.div_(self._column(self._temperature, context))

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Divide every row, by 1 for rows without temperature."""
        return logits.div_(self._column_or(self._temperature, 1.0, context))
