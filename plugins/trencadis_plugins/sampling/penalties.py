"""Penalties for tokens that already occurred: repetition, frequency and presence.

Shapes: R rows, V vocabulary, T longest history of the call.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.arithmetic import tensor_on
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["Penalties"]


class Penalties(RowProcessor):
    """Repetition over prompt and output, then frequency and presence over the output.

    Counts are taken from the tokens up to each logits row's own position, so that the rows of drafts are penalised as
    they would be one at a time.

    Source: repetition: Keskar et al., "CTRL", 2019, section 4.1, with the sign rule that transformers and vLLM use;
    frequency and presence: OpenAI API reference, ``frequency_penalty`` and ``presence_penalty``.
    """

    label = "the penalties"
    honours = frozenset({"penalties"})
    needs_history = True
    supports_branches = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self._repetition = np.ones(num_rows, dtype=np.float32)
        self._frequency = np.zeros(num_rows, dtype=np.float32)
        self._presence = np.zeros(num_rows, dtype=np.float32)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether any of the three is on. Pure."""
        params = start.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def _take(self, start: RowStart) -> None:
        self._num_prompt_tokens[start.row] = start.num_prompt_tokens
        self._repetition[start.row] = start.params.repetition_penalty
        self._frequency[start.row] = start.params.frequency_penalty
        self._presence[start.row] = start.params.presence_penalty

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return self._penalise(logits, context, length=max(context.positions) + 1)

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Process every row with the longest possible history, with penalties of 1 and 0 for rows without any."""
        return self._penalise(logits, context, length=context.tokens.shape[1])

    def _penalise(self, logits: torch.Tensor, context: SamplingContext, *, length: int) -> torch.Tensor:
        tokens, is_known, is_output = self._history(context, length)
        seen = _count(tokens, is_known, logits) > 0
        count = _count(tokens, is_output, logits)
        # Work on the cells that occur in the history. A token that occurs twice, or stands in for an unknown place, is
        # computed twice from the same numbers, so that it does not matter which result is written last.
        cells = logits.gather(1, tokens)
        repetition = self._column_or(self._repetition, 1.0, context)
        cells = torch.where(seen, torch.where(cells > 0, cells / repetition, cells * repetition), cells)
        cells = cells - self._column_or(self._frequency, 0.0, context) * count
        cells = cells - self._column_or(self._presence, 0.0, context) * (count > 0)
        return logits.scatter_(1, tokens, cells)

    def _history(self, context: SamplingContext, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens int64 ``[R, T]``, which places are filled, and which are output, bool ``[R, T]``."""
        device = context.tokens.device
        rows = tensor_on(context.histories, device)
        places = torch.arange(length, device=device)
        is_known = places <= tensor_on(context.positions, device)[:, None]
        is_output = is_known & (places >= self._column(self._num_prompt_tokens, context))
        tokens = context.tokens[rows, :length].long().masked_fill_(~is_known, 0)
        return tokens, is_known, is_output


def _count(tokens: torch.Tensor, is_counted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return how often the token of each place occurs among the counted places, float32 ``[R, T]``; exact to 2**24."""
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, is_counted.to(logits.dtype))
    return counts.gather(1, tokens)
