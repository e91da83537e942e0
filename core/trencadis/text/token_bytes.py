"""The exact bytes of one token.

A token need not be text: it may hold part of a character, or begin with a space that a decoder drops at the start of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

__all__ = ["ByteTable", "TokenBytes", "is_byte_level"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BEGINNINGS = ("a", ".", "0", "1", "the", "A")
"""Texts of which any vocabulary has one."""


class TokenBytes:
    """Bytes by token id: the text that the tokenizer's own decoder adds for a token, wherever a text has begun.

    ================  =========================================================================
    control signs     their name: they are not text
    byte-level BPE    one character of the token stands for one byte
    byte fallback     ``<0xNN>`` is that byte
    anything else     what decoding adds for the token after a text (WordPiece: with the space before a word)
    ================  =========================================================================

    Args:
        hf: A tokenizer of transformers.
        special_token_ids: Tokens that are control signs.
    """

    def __init__(self, hf: Any, special_token_ids: Collection[int] = ()) -> None:
        self._hf = hf
        self._fast = getattr(hf, "backend_tokenizer", None)
        self._special = frozenset(special_token_ids)
        kinds = {step["type"] for step in _decoder_steps(self._fast)}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = self._fast is None or "ByteFallback" in kinds
        self._anchor = self._begin()
        self._before = self._text(self._anchor)
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not know. Pure."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._found(token_id, lambda: self._text([*self._anchor, token_id]))
        return found

    def read(self, num_ids: int) -> tuple[bytes, ...]:
        """Return the bytes of each token id from 0; decodes them all at once. Pure; O(vocabulary)."""
        runs = [[*self._anchor, token_id] for token_id in range(num_ids)]
        if self._fast is None or self._is_byte_level:
            return tuple(map(self, range(num_ids)))
        texts = self._fast.decode_batch(runs, skip_special_tokens=False)
        return tuple(self._found(token_id, partial(str, text)) for token_id, text in enumerate(texts))

    def added_by(self, token_ids: Sequence[int]) -> str:
        """Return the text that tokens add to one before them, as the tokenizer decodes them. Pure."""
        return self._added(self._text([*self._anchor, *token_ids]), lambda: self._text(list(token_ids)))

    def _found(self, token_id: int, decoded: Callable[[], str]) -> bytes:
        """Return a token's bytes; ``decoded`` returns the text of the anchor and the token."""
        token = self._token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return token.encode()
        if self._is_byte_level:
            return _from_byte_level(token)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        # No text has half of a surrogate pair: what is decoded to one writes nothing that could be sent.
        return self._added(decoded(), lambda: self._text([token_id])).encode(errors="ignore")

    def _added(self, both: str, alone: Callable[[], str]) -> str:
        """Return what stands after the anchor; the text of its own where a decoder joins the two into something else."""
        return both[len(self._before) :] if both.startswith(self._before) else alone()

    def _begin(self) -> list[int]:
        """Return tokens that begin a text, so that what a decoder does at its start is done with."""
        for text in _BEGINNINGS:
            ids = list(self._hf.encode(text, add_special_tokens=False))
            if self._text(ids):
                return ids
        return []

    def _token(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        if self._fast is not None:
            token: str | None = self._fast.id_to_token(token_id)
            return token
        return self._hf.convert_ids_to_tokens(token_id) if token_id < len(self._hf) else None

    def _text(self, ids: list[int]) -> str:
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=False))
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def is_byte_level(fast: Any) -> bool:
    """Return whether a tokenizer of tokenizers does nothing but join bytes and read them as UTF-8. Pure."""
    return [step["type"] for step in _decoder_steps(fast)] == ["ByteLevel"]


class ByteTable(dict[int, bytes]):
    """Bytes by token id as a byte-level decoder joins them, found when they are first asked for; none for an unknown id.

    Args:
        fast: A tokenizer of tokenizers.
    """

    def __init__(self, fast: Any) -> None:
        super().__init__()
        self._fast = fast

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = self._fast.id_to_token(token_id) if token_id >= 0 else None
        found = self[token_id] = b"" if token is None else _from_byte_level(token)
        return found


def _decoder_steps(fast: Any) -> list[dict[str, Any]]:
    """Return what a decoder of tokenizers does, in order. Pure."""
    if fast is None or fast.decoder is None:
        return []
    # The state that pickle would store is the decoder's part of tokenizer.json; the decoder has no other face.
    return _flat(json.loads(fast.decoder.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat(part)]


def _from_byte_level(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte after each character of a byte-level vocabulary. Pure.

    Printable bytes stand for themselves; the others, in order, have the characters from U+0100 on.

    Source: GPT-2, Radford et al. 2019, section 2.2; the table is ``bytes_to_unicode`` in ``encoder.py`` of openai/gpt-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
