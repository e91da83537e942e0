"""Top-k: only the k most likely tokens stay."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["TopK"]


class TopK(RowProcessor):
    """Drops tokens less likely than the k-th; tokens as likely as the k-th all stay, also if that makes more than k.

    Source: Fan, Lewis, Dauphin, "Hierarchical neural story generation", 2018, section 5.3; the tie rule is that of
    transformers and vLLM.
    """

    argmax_invariant = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._k = np.ones(num_rows, dtype=np.int64)

    def asks(self, start: RowStart) -> bool:
        """Return whether top-k can drop a token. Pure."""
        return 0 < start.params.top_k < self._vocab_size

    def _take(self, start: RowStart) -> None:
        self._k[start.row] = start.params.top_k

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        largest = logits.topk(int(self._k[list(context.rows)].max())).values
        kth = largest.gather(1, self._column(self._k, context) - 1)
        return logits.masked_fill_(logits < kth, -torch.inf)
