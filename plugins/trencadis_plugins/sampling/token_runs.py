"""Masks that depend on the last tokens: no repeated n-grams, and no bad words of several tokens."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import Int32Array, RowStart
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowProcessor, histories, on_device

__all__ = ["BadWords", "NoRepeatNgram"]

_Word = tuple[Int32Array, int]


class NoRepeatNgram(RowProcessor):
    """Masks every token that would complete an n-gram of ``no_repeat_ngram_size`` that occurred before, in the prompt too.

    Source: Paulus, Xiong, Socher, "A deep reinforced model for abstractive summarization", 2018, section 2.5; the rule of
    transformers.
    """

    label = "no_repeat_ngram_size"
    honours = frozenset({"no_repeat_ngram_size"})
    example = ("no_repeat_ngram_size", 9)
    needs_history = True
    supports_branches = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._size = np.zeros(num_rows, dtype=np.int64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether n-grams must not repeat. Pure."""
        return start.params.no_repeat_ngram_size > 0

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether a token repeats no n-gram of the prompt. Pure."""
        return token_id not in _followers(start.token_ids, start.params.no_repeat_ngram_size)

    def _take(self, start: RowStart) -> None:
        self._size[start.row] = start.params.no_repeat_ngram_size

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row, history in zip(logits, context.rows, histories(context), strict=True):
            banned = _followers(history, int(self._size[row]))
            row_logits[on_device(banned, logits)] = -torch.inf
        return logits


def _followers(history: Int32Array, size: int) -> np.ndarray:
    """Return the tokens after each earlier occurrence of the last ``size - 1`` tokens, int64. Pure; O(history * size)."""
    num_runs = len(history) - size + 1
    if num_runs <= 0:
        return np.empty(0, np.int64)
    places = np.arange(num_runs)
    for i in range(size - 1):
        places = places[history[places + i] == history[len(history) - size + 1 + i]]
    return history[places + size - 1].astype(np.int64)


class BadWords(RowProcessor):
    """Masks the last token of each of ``bad_words_ids`` if the tokens before it end the history.

    Source: transformers, ``NoBadWordsLogitsProcessor``.
    """

    label = "bad_words"
    honours = frozenset({"bad_words_ids"})
    example = ("bad_words_ids", ((0, 0),))
    needs_history = True
    supports_branches = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._always = RowStates[list[int]](self.label)
        self._words = RowStates[dict[int, list[_Word]]](self.label)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether there are bad words. Pure."""
        return bool(start.params.bad_words_ids)

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether a token completes no bad word that the prompt has begun. Pure."""
        history = start.token_ids.tolist()
        return not any(
            last == token_id and history[len(history) - len(before) :] == before
            for *before, last in start.params.bad_words_ids
            if len(before) <= len(history)
        )

    def _take(self, start: RowStart) -> None:
        # By the token before the last: so a step looks at the few words that could end now.
        words: dict[int, list[_Word]] = {}
        for *before, last in start.params.bad_words_ids:
            if before:
                words.setdefault(before[-1], []).append((np.array(before, np.int32), last))
        self._words[start.row] = words
        self._always[start.row] = [word[0] for word in start.params.bad_words_ids if len(word) == 1]

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row, history in zip(logits, context.rows, histories(context), strict=True):
            words = self._words[row].get(int(history[-1]), ())
            ending = [last for before, last in words if np.array_equal(history[-len(before) :], before)]
            banned = np.array([*self._always[row], *ending], np.int64)
            row_logits[on_device(banned, logits)] = -torch.inf
        return logits
