"""Token ids to text, a few tokens at a time.

A token's text may depend on its neighbours: a character may be spread over several tokens, and decoders strip the space before
the first token. So the last few tokens are decoded again with each new one, and only what is new is passed on::

    tokens   ... t5 t6 t7 t8 t9          window: the tokens that are decoded
    text     ... emitted───────▏new ▏�   the last character waits if it may be incomplete

A byte-level tokenizer needs no window: its tokens are bytes, and only the bytes of an unfinished character wait. With byte fallback
these bytes wait before the window, so that what is in it is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from trencadis.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_MAX_WINDOW = 24
_CONTEXT = 8
"""Tokens kept before new ones. Four suffice to know the state of a UTF-8 decoder, whose characters have up to four bytes;
one suffices for a decoder that strips a leading space."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one growing sequence; O(1) amortised per token.

    All deltas and the flush together are exactly the text that the tokens have in one piece. No delta holds part of a character or
    text that a later token changes.

    Args:
        tokenizer: Decodes.
        skip_special_tokens: Leave special tokens out.
        prompt_token_ids: Tokens before the text; their end decides, for example, whether the first word has a space before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._table = tokenizer.byte_table
        if self._table is not None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._is_whole = True
            self.add(prompt_token_ids[-_CONTEXT:])
            return
        self._runs = tokenizer.byte_fallback.runs() if tokenizer.byte_fallback is not None else None
        self._window: list[int] = []
        self._extend(prompt_token_ids[-_CONTEXT:])
        self._emitted = len(self._certain())

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain now and was not before; often a word, sometimes nothing."""
        if self._table is not None:
            table, hidden = self._table, self._hidden
            text = ""
            for token in token_ids:  # most often one
                if token not in hidden:
                    piece = table[token]
                    # With nothing of a character waiting, ASCII needs no decoder: most tokens are.
                    if self._is_whole and piece.isascii():
                        text += piece.decode("ascii")
                    else:
                        text += self._decoder.decode(piece)
                        self._is_whole = not self._decoder.getstate()[0]
            return text
        if not self._extend(token_ids):
            return ""
        text = self._certain()
        delta = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        if len(self._window) > _MAX_WINDOW:
            self._shorten()
        return delta

    def flush(self) -> str:
        """Return what was held back, because no token will follow."""
        if self._table is not None:
            return self._decoder.decode(b"", final=True)
        if self._runs is not None:
            self._window += self._runs.flush()
        text = self._tokenizer.decode_certain(self._window) if self._window else ""
        delta = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return delta

    def _extend(self, token_ids: Iterable[int]) -> bool:
        """Append tokens to the window; returns whether there were any."""
        window, runs, before = self._window, self._runs, len(self._window)
        for token in token_ids:
            if token not in self._hidden and self._tokenizer.knows(token):
                window += (token,) if runs is None else runs.add(token)
        return len(window) > before

    def _certain(self) -> str:
        """Return the text of the window that no later token changes."""
        tokenizer, window = self._tokenizer, self._window
        text = tokenizer.decode_certain(window) if window else ""
        if tokenizer.next_token and window:
            text = _shared_beginning(text, tokenizer.decode_certain(window + tokenizer.next_token))
        return _settled(text) if self._runs is None else text

    def _shorten(self) -> None:
        window, before = self._window, self._emitted
        start = len(window) - _CONTEXT
        while self._runs is not None and self._runs.continues(window[start]):
            start -= 1
        self._window = window[start:]
        self._emitted = len(self._certain())
        # A window without text has not used up the space its decoder strips: it must grow.
        if not self._emitted:
            self._window, self._emitted = window, before


def _settled(text: str) -> str:
    """Return ``text`` without a last character that may be incomplete. Pure.

    However many bytes of it have come, an unfinished UTF-8 character at the end is decoded as one replacement character.

    Source: The Unicode Standard, section 3.9, "U+FFFD substitution of maximal subparts".
    """
    return text[:-1] if text.endswith(_INCOMPLETE) else text


def _shared_beginning(one: str, other: str) -> str:
    """Return the characters with which both texts begin. Pure."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
