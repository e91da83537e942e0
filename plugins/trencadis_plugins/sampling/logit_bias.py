"""Numbers that a request adds to the logits of single tokens."""

from __future__ import annotations

import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["LogitBias"]


class LogitBias(RowProcessor):
    """Adds ``logit_bias``; a masked token stays masked."""

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def asks(self, start: RowStart) -> bool:
        """Return whether there is a bias. Pure."""
        return bool(start.params.logit_bias)

    def _take(self, start: RowStart) -> None:
        bias = start.params.logit_bias
        ids = torch.tensor(list(bias), dtype=torch.int64, device=self._device)
        self._bias[start.row] = ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row in zip(logits, context.rows, strict=True):
            ids, bias = self._bias[row]
            row_logits[ids] += bias
        return logits
