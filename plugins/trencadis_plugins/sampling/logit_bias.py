"""``logit_bias``: numbers added to the logits of single tokens."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowMask, on_device

__all__ = ["LogitBias"]


class LogitBias(RowMask):
    """Adds ``logit_bias``; a masked token stays masked."""

    label = "logit_bias"
    honours = frozenset({"logit_bias"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._bias = RowStates[tuple[np.ndarray, np.ndarray]](self.label)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether there is a bias. Pure."""
        return bool(start.params.logit_bias)

    def _take(self, start: RowStart) -> None:
        bias = start.params.logit_bias
        self._bias[start.row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row in zip(logits, context.rows, strict=True):
            ids, bias = self._bias[row]
            row_logits[on_device(ids, logits)] += on_device(bias, logits)
        return logits

    def add_to(self, bias: np.ndarray, row: int, position: int) -> None:
        """Add the row's numbers."""
        ids, numbers = self._bias[row]
        bias[ids] += numbers
