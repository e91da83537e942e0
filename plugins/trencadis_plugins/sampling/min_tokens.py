"""``min_tokens``: no end of sequence before this number of tokens."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowMask, on_device

__all__ = ["MinTokens"]


class MinTokens(RowMask):
    """Masks end-of-sequence and stop tokens while the output is shorter than ``min_tokens``.

    Structured output may be complete before that: where nothing but the end is left, it stays.
    """

    label = "min_tokens"
    honours = frozenset({"min_tokens"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._ids = RowStates[np.ndarray](self.label)
        self._first_free_position = np.zeros(num_rows, dtype=np.int64)
        self._yields = np.zeros(num_rows, dtype=np.bool_)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the end of sequence could come too early. Pure."""
        return start.params.min_tokens > 0 and bool(self._known_ids(start))

    def _known_ids(self, start: RowStart) -> list[int]:
        # A model may name an end-of-sequence token that its own head cannot produce.
        return [token for token in start.eos_token_ids if token < self._vocab_size]

    def _take(self, start: RowStart) -> None:
        self._ids[start.row] = np.array(self._known_ids(start), np.int64)
        # Logits at position p choose output token number p + 1 - num_prompt_tokens, counted from 0.
        self._first_free_position[start.row] = start.num_prompt_tokens - 1 + start.params.min_tokens
        self._yields[start.row] = start.params.structured is not None

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row, position in zip(logits, context.rows, context.positions, strict=True):
            if position < self._first_free_position[row]:
                ids = on_device(self._ids[row], logits)
                ends = row_logits[ids]
                row_logits[ids] = -torch.inf
                if self._yields[row] and bool(torch.isneginf(row_logits.amax())):
                    row_logits[ids] = ends
        return logits

    def add_to(self, bias: np.ndarray, row: int, position: int) -> None:
        """Mask the row's end-of-sequence and stop tokens while the output is too short."""
        if position < self._first_free_position[row]:
            bias[self._ids[row]] = -np.inf
