"""Masks by token id: allowed tokens and bad tokens."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowMask, on_device

__all__ = ["AllowedTokens", "BadTokens"]


class AllowedTokens(RowMask):
    """Masks every token but ``allowed_token_ids``."""

    label = "allowed_token_ids"
    honours = frozenset({"allowed_token_ids"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._ids = RowStates[np.ndarray](self.label)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether only some tokens are allowed. Pure."""
        return start.params.allowed_token_ids is not None

    def _take(self, start: RowStart) -> None:
        self._ids[start.row] = np.array(start.params.allowed_token_ids, np.int64)

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row in zip(logits, context.rows, strict=True):
            ids = on_device(self._ids[row], logits)
            kept = row_logits[ids]
            row_logits.fill_(-torch.inf)
            row_logits[ids] = kept
        return logits

    def add_to(self, bias: np.ndarray, row: int, position: int) -> None:
        """Mask every other token."""
        ids = self._ids[row]
        kept = bias[ids]
        bias.fill(-np.inf)
        bias[ids] = kept


class BadTokens(RowMask):
    """Masks ``bad_token_ids``."""

    label = "bad_token_ids"
    honours = frozenset({"bad_token_ids"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._ids = RowStates[np.ndarray](self.label)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether some tokens are banned. Pure."""
        return bool(start.params.bad_token_ids)

    def _take(self, start: RowStart) -> None:
        self._ids[start.row] = np.array(start.params.bad_token_ids, np.int64)

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row in zip(logits, context.rows, strict=True):
            row_logits[on_device(self._ids[row], logits)] = -torch.inf
        return logits

    def add_to(self, bias: np.ndarray, row: int, position: int) -> None:
        """Mask the row's tokens."""
        bias[self._ids[row]] = -np.inf
