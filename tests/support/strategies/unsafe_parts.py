"""Parts by import path: a logits processor that is not safe with drafts, and a drafter that remembers whom it was asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from trencadis.interfaces import DraftView, LogitsProcessor, SamplingContext, Speculator
from trencadis.records import Drafts, RowStart


class CountsCalls(LogitsProcessor):
    """Bans the token of its number of calls: right one position at a time, and never with drafts."""

    name = "counts_calls"
    speculation_safe = False

    def __init__(self) -> None:
        self._num_calls: dict[int, int] = {}

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Nothing to keep."""

    def start_row(self, start: RowStart) -> None:
        """Begin to count."""
        self._num_calls[start.row] = 0

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Ban one token for each row."""
        for index, row in enumerate(context.rows):
            logits[index, self._num_calls[row] + 3] = -torch.inf
            self._num_calls[row] += 1
        return logits


class Remembering(Speculator):
    """Drafts the last token again, for whoever it is asked.

    Attributes:
        asked: Ids of the requests; shared by all instances.
    """

    max_draft_tokens = 3
    asked: ClassVar[set[str]] = set()

    def propose(self, view: DraftView) -> Drafts:
        """Return as many drafts as may be."""
        self.asked.update(request.request_id for request in view.requests)
        last: Any = np.array([tokens[-1] for tokens in view.token_ids], np.int32)
        return Drafts(num_drafts=view.max_draft_tokens, token_ids=np.repeat(last, view.max_draft_tokens))
