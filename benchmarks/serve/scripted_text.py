"""A model that says what it is told, at the cost of computing it; and drafters that know, or never know, what comes.

What a speculator is worth depends on the text. Small models do not quote, and random ones say nothing at all; so the forward runs as it
is, and a logits processor then gives all weight to the next token of a given answer.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import DraftView, LogitsProcessor, SamplingContext, Speculator
from trencadis.records import Drafts, RowStart

__all__ = ["ANSWERS", "Oracle", "Scripted", "Wrong"]

ANSWERS: dict[tuple[int, ...], tuple[int, ...]] = {}
"""Output tokens by prompt tokens; other prompts are answered freely."""


class Scripted(LogitsProcessor):
    """Gives all weight to the next token of the prompt's answer."""

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room."""
        self._starts: list[tuple[int, tuple[int, ...]]] = [(0, ())] * num_rows

    def start_row(self, start: RowStart) -> None:
        """Look the answer up."""
        prompt = tuple(start.token_ids[: start.num_prompt_tokens].tolist())
        self._starts[start.row] = start.num_prompt_tokens, ANSWERS.get(prompt, ())

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Change one logit of each row."""
        for index, (row, position) in enumerate(zip(context.rows, context.positions, strict=True)):
            num_prompt_tokens, answer = self._starts[row]
            place = position + 1 - num_prompt_tokens
            if place < len(answer):
                logits[index, answer[place]] = 1e4
        return logits


class Oracle(Speculator):
    """Drafts what will come."""

    def __init__(self, max_draft_tokens: int = 4) -> None:
        self.max_draft_tokens = max_draft_tokens

    def propose(self, view: DraftView) -> Drafts:
        """Return the answer's next tokens."""
        runs = []
        for request, tokens, most in zip(view.requests, view.token_ids, view.max_draft_tokens.tolist(), strict=True):
            done = len(tokens) - len(request.prompt_token_ids)
            runs.append(self._draft(ANSWERS.get(request.prompt_token_ids, ())[done : done + most]))
        return Drafts(
            num_drafts=np.array([len(run) for run in runs], np.int32),
            token_ids=np.array([token for run in runs for token in run], np.int32),
        )

    def _draft(self, following: tuple[int, ...]) -> tuple[int, ...]:
        return following


class Wrong(Oracle):
    """Drafts as much as it may, and every draft is wrong."""

    def _draft(self, following: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((token + 1) % 97 + 1 for token in following)
