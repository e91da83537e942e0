"""Tokens that stand for one byte, read by the rules of UTF-8.

A vocabulary with byte fallback has a token ``<0xNN>`` for each byte of a character that it has no token for. The decoders of tokenizers
and SentencePiece read a run of them as a whole, and only once it has ended: one byte that fits nowhere, such as the begin of a
character that was cut off, makes them give up the valid characters beside it as well. Here a character is complete with its last byte,
and what is no character becomes U+FFFD, one for each maximal subpart, as in the decoders of browsers and of Python.

So the run is rewritten before the tokenizer decodes it: the tokens of U+FFFD take the place of bytes that fit nowhere. The tokenizer then
sees valid text alone, which it decodes alike in one piece and in several.

Sources: The Unicode Standard, section 3.9, "U+FFFD substitution of maximal subparts"; https://encoding.spec.whatwg.org/#utf-8-decoder.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["ByteFallback", "ByteRuns"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteFallback:
    """Byte tokens of a vocabulary.

    Args:
        vocabulary: Ids by token.
        decode: Returns the text of token ids as the tokenizer has it.

    Attributes:
        byte_of: Bytes by token id; empty if the tokenizer does not read such tokens as bytes.
    """

    def __init__(self, vocabulary: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> None:
        found = {token_id: match for token, token_id in vocabulary.items() if (match := _BYTE_TOKEN.fullmatch(token))}
        self.byte_of: Mapping[int, int] = {token_id: int(match[1], 16) for token_id, match in found.items()}
        self._id_of = {byte: token_id for token_id, byte in self.byte_of.items()}
        replacement = _REPLACEMENT.encode()
        # A vocabulary from which rare tokens were removed may have no way to write U+FFFD: bytes that fit nowhere then have no text.
        self._replacement: Sequence[int] = (
            [self._id_of[byte] for byte in replacement]
            if self._id_of.keys() >= set(replacement)
            else [vocabulary[_REPLACEMENT]]
            if _REPLACEMENT in vocabulary
            else []
        )
        sample = next((byte for byte in self._id_of if 0x21 <= byte < 0x7F), None)
        if sample is None or decode([self._id_of[sample]]) != chr(sample):
            self.byte_of = {}

    def runs(self) -> ByteRuns:
        """Return what rewrites a sequence token by token."""
        return ByteRuns(self)

    def rewritten(self, token_ids: Iterable[int]) -> list[int]:
        """Return token ids whose byte tokens are valid UTF-8. Pure."""
        runs = self.runs()
        rewritten = [new for token_id in token_ids for new in runs.add(token_id)]
        return rewritten + runs.flush()

    def ids_of(self, text: str) -> list[int]:
        """Return the byte tokens of characters that were read from some. Pure."""
        ids: list[int] = []
        for character in text:
            ids += (
                self._replacement if character == _REPLACEMENT else [self._id_of[byte] for byte in character.encode()]
            )
        return ids


class ByteRuns:
    """Rewrites one growing sequence; O(1) per token.

    Args:
        fallback: Byte tokens of the tokenizer.
    """

    def __init__(self, fallback: ByteFallback) -> None:
        self._fallback = fallback
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_waiting = False

    def add(self, token_id: int) -> Sequence[int]:
        """Return the tokens that are certain now; none while a character may go on."""
        byte = self._fallback.byte_of.get(token_id)
        if byte is None:
            return [*self.flush(), token_id] if self._is_waiting else (token_id,)
        text = self._decoder.decode(bytes((byte,)))
        self._is_waiting = bool(self._decoder.getstate()[0])
        return self._fallback.ids_of(text)

    def continues(self, token_id: int) -> bool:
        """Return whether a token stands for a byte inside a character. Pure."""
        byte = self._fallback.byte_of.get(token_id)
        return byte is not None and byte & 0xC0 == 0x80

    def flush(self) -> list[int]:
        """Return the tokens for the begin of a character that does not go on."""
        self._is_waiting = False
        return self._fallback.ids_of(self._decoder.decode(b"", final=True))
