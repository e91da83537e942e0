"""State of one sequence in its grammar, and the tokens allowed next.

Shapes: W = ceil(tokens of the vocabulary / 32) words of a mask; bit i of word w stands for token 32 w + i, 1 is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trencadis.errors import InvalidRequestError
from trencadis.interfaces import Vocabulary
from trencadis.records import Int32Array
from trencadis_plugins.sampling.grammar_tokens import allowed_by

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarState", "LeftGrammarError"]


class LeftGrammarError(ValueError):
    """An output is not the beginning of a text of the grammar: nothing can follow it."""


class GrammarState:
    """Matcher state after an output, moved forwards and back; a mask is a function of the output alone.

    Args:
        matcher: At the beginning of the text; of this sequence alone.
        vocabulary: Vocabulary of the model.
        eos_token_id: The end of a text to the matcher.
        end_token_ids: Tokens that end this sequence; allowed where the text may end, and from then on alone.
        on_failure: Called when the library gives up on the grammar.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocabulary: Vocabulary,
        eos_token_id: int,
        end_token_ids: Collection[int],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._matcher = matcher
        self._on_failure = on_failure
        self._vocabulary = vocabulary
        num_words = -(-len(vocabulary.tokens) // 32)
        self._eos = _bits([eos_token_id], num_words)
        self._ends = _bits(end_token_ids, num_words)
        self._end_token_ids = frozenset(end_token_ids)
        self._taken: list[int] = []  # by the matcher: the output up to an end, or to what is forbidden
        self._is_ended = False
        self._forbidden: int | None = None
        self._filled: Int32Array | None = None

    def mask(self, output: Sequence[int]) -> Int32Array:
        """Return the tokens allowed after an output, int32 ``[W]``, read-only; at least one.

        Raises:
            LeftGrammarError: The output is not the beginning of a text of the grammar, as after a draft that it forbids.
            InvalidRequestError: The grammar has become too complex for the library, or no token of the vocabulary goes on.
        """
        num_common = _num_common(self._taken, output)
        if num_common < len(self._taken):
            self._matcher.rollback(len(self._taken) - num_common)
            del self._taken[num_common:]
            self._filled = None
            self._check()
        self._is_ended, self._forbidden = False, None
        rest = list(output[num_common:])
        end = next((i for i, token in enumerate(rest) if token in self._end_token_ids), len(rest))
        self._take(rest[:end])
        if end < len(rest):
            self._end(rest[end])
        return self._current()

    def advance(self, token: int) -> Int32Array:
        """Return the tokens allowed after the last output and one more token; as :meth:`mask`, but O(1)."""
        if token in self._end_token_ids:
            self._end(token)
        elif not self._is_ended:
            self._take([token])
        return self._current()

    def has_mask(self, output: Sequence[int]) -> bool:
        """Return whether the mask after an output is already computed. Pure."""
        return self._filled is not None and self._taken == list(output)

    def _take(self, tokens: list[int]) -> None:
        if self._forbidden is not None or not tokens:
            return
        num_taken = self._matcher.try_consume_tokens(tokens)
        self._taken += tokens[:num_taken]
        self._forbidden = tokens[num_taken] if num_taken < len(tokens) else None
        self._filled = None
        self._check()

    def _end(self, token: int) -> None:
        self._is_ended = self._is_ended or (self._forbidden is None and self._matcher.is_accepting())
        if not self._is_ended and self._forbidden is None:
            self._forbidden = token

    def _current(self) -> Int32Array:
        if self._forbidden is not None:
            raise LeftGrammarError(
                f"structured output: token {self._forbidden} has come after {self._taken[-8:]}, which is no text of the grammar."
            )
        if self._is_ended:
            return self._ends
        if self._filled is None:
            self._filled = self._fill()
        return self._filled

    def _fill(self) -> Int32Array:
        words = allowed_by(self._matcher, self._vocabulary)
        self._check()
        words &= ~self._eos
        if self._matcher.is_accepting():
            words |= self._ends
        if not words.any():
            raise InvalidRequestError(
                f"structured output: no token of the vocabulary goes on after {self._taken[-8:]}, where the text may not end.",
                hint="Ask for texts that the model's tokenizer can write: it may lack signs, or know one case of letters alone.",
            )
        return words

    def _check(self) -> None:
        if self._matcher.is_error():
            self._on_failure()
            reason = self._matcher.get_error().splitlines()[0][:200]
            raise InvalidRequestError(
                f"structured output: the library gave up on the grammar: {reason}.",
                hint="Make it simpler, or bound how often its parts may repeat.",
            )


def _num_common(taken: Sequence[int], output: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists. Pure."""
    if list(output[: len(taken)]) == taken:
        return len(taken)
    shorter = min(len(taken), len(output))
    return next((i for i in range(shorter) if taken[i] != output[i]), shorter)


def _bits(token_ids: Collection[int], num_words: int) -> Int32Array:
    words = np.zeros(num_words, np.uint32)
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)
