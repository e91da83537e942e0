"""The vocabulary as llguidance has it: a token for every byte, so that each forced text has tokens whose bytes are exactly the text's.

A grammar often says what comes next, such as the name of a property. The library asks for the tokens of that text, and allows the first of
them alone. Tokens of another text would end the grammar: with a space in front, in lower case, or in another form of a character.

Shapes: V tokens of the vocabulary, E further ones for bytes without a token, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from trencadis.interfaces import Vocabulary
from trencadis.records import Int32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["TokenTable", "allowed_by"]

_MARK = 0xFF
"""Byte by which the library marks special tokens; no text has it."""

_MAX_SEARCHED = 256
"""Bytes of a forced text that are cut into as few tokens as can be; the first token counts, and those at the end."""

_MAX_TOKEN = 64


class TokenTable:
    """A vocabulary with the attributes that llguidance reads.

    Attributes:
        tokens: Bytes of each token: V of the vocabulary, and E of one byte that no token has.
        special_token_ids: Tokens that are control signs.
        eos_token_id: The end of a text.
        bos_token_id: None.
    """

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = (*vocabulary.tokens, *_missing_bytes(vocabulary))
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are those of a text: the tokenizer's own, or as few as can be where it writes another text. Pure."""
        if not isinstance(text, str):  # bytes are refused, by which the library learns to come with text
            raise TypeError("this tokenizer reads text")
        data, ids = text.encode(), list(self._encode(text))
        if b"".join(self.tokens[token] if token < len(self.tokens) else b"" for token in ids) == data:
            return ids
        return self._fewest(data[:_MAX_SEARCHED]) + [self._by_bytes[bytes([byte])] for byte in data[_MAX_SEARCHED:]]

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        # Of equal ones the last: tokens of byte fallback come first.
        return {data: token for token, data in enumerate(self.tokens) if data and token not in special}

    def _fewest(self, data: bytes) -> list[int]:
        """Return the fewest tokens that have these bytes. Pure; O(bytes)."""
        by_bytes = self._by_bytes
        best: list[tuple[int, int]] = [(0, -1)]  # tokens up to each place, and the last of them
        for end in range(1, len(data) + 1):
            ways = ((begin, by_bytes.get(data[begin:end])) for begin in range(max(0, end - _MAX_TOKEN), end))
            best.append(min((best[begin][0] + 1, token) for begin, token in ways if token is not None))
        ids: list[int] = []
        end = len(data)
        while end:
            ids.append(best[end][1])
            end -= len(self.tokens[ids[-1]])
        return ids[::-1]


def allowed_by(matcher: LLMatcher, vocabulary: Vocabulary) -> Int32Array:
    """Return the tokens of the vocabulary that a matcher allows next, int32 ``[W]``; without those for bytes that have no token."""
    num_tokens = len(vocabulary.tokens)
    words = np.empty(-(-(num_tokens + len(_missing_bytes(vocabulary))) // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    words = words[: -(-num_tokens // 32)]
    if num_tokens % 32:
        words[-1] &= np.int32((1 << num_tokens % 32) - 1)
    return words


@lru_cache(maxsize=4)
def _missing_bytes(vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """Return the bytes that no token of text has alone. Pure."""
    special = vocabulary.special_token_ids
    present = {data for token, data in enumerate(vocabulary.tokens) if len(data) == 1 and token not in special}
    return tuple(data for byte in range(_MARK) if (data := bytes([byte])) not in present)
