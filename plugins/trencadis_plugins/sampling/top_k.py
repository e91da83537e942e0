"""Top-k: keeps the k most likely tokens."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor, largest

__all__ = ["TopK"]


class TopK(RowProcessor):
    """Drops tokens less likely than the k-th; all ties with the k-th stay.

    Source: Fan, Lewis, Dauphin, "Hierarchical neural story generation", 2018, section 5.3; the tie rule is that of
    transformers and vLLM.
    """

    honours = frozenset({"top_k"})
    argmax_invariant = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._k = np.ones(num_rows, dtype=np.int64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether top-k can drop a token. Pure."""
        return 0 < start.params.top_k < self._vocab_size

    def _take(self, start: RowStart) -> None:
        self._k[start.row] = start.params.top_k

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        largest = logits.topk(int(self._k[list(context.rows)].max())).values
        kth = largest.gather(1, self._column(self._k, context) - 1)
        return logits.masked_fill_(logits < kth, -torch.inf)

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Compare every row with its k-th logit, or with minus infinity for rows without top-k; k is at most ``width``."""
        # Beyond ``width`` are only rows that are not drawn from.
        kth = largest(logits, width).gather(1, self._column_or(np.minimum(self._k, width), 1, context) - 1)
        kth = kth.masked_fill(~self._flags(context), -torch.inf)
        return logits.masked_fill_(logits < kth, -torch.inf)

    def num_kept(self, context: SamplingContext) -> np.ndarray:
        """Return k of each logits row, 0 for those without top-k, int64 ``[L]``. Pure."""
        return np.where(self.asked(context), self._k[np.asarray(context.rows, dtype=np.intp)], 0)
