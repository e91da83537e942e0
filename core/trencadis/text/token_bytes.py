"""The exact bytes of one token.

A token need not be text: it may hold part of a character, or begin with a space that a decoder drops at the start of a text.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

__all__ = ["ByteTable", "TokenBytes", "is_byte_level"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, found from what the tokenizer's decoder does with a token.

    ================  =========================================================================
    added tokens      their content: they are matched in the text as it is
    byte-level BPE    one character of the token stands for one byte
    byte fallback     ``<0xNN>`` is that byte; in other tokens a sign stands for the space
    anything else     what the token adds to a text before it (WordPiece: with the space before a word)
    ================  =========================================================================

    Args:
        hf: A tokenizer of transformers.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._fast = getattr(hf, "backend_tokenizer", None)
        steps = _decoder_steps(self._fast)
        kinds = {step["type"] for step in steps}
        added = {} if self._fast is None else self._fast.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = self._fast is None or "ByteFallback" in kinds
        self._replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
        self._anchor = list(hf.encode("a", add_special_tokens=False))

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not know. Pure."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _from_byte_level(token)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        if not self._replacements:
            return self._decoded(token_id).encode()
        for sign, text in self._replacements:
            token = token.replace(sign, text)
        return token.encode()

    def _token(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        if self._fast is not None:
            token: str | None = self._fast.id_to_token(token_id)
            return token
        return self._hf.convert_ids_to_tokens(token_id) if token_id < len(self._hf) else None

    def _decoded(self, token_id: int) -> str:
        """Return what the token adds after another; its own text where a decoder joins the two into something else."""
        before, both = self._text(self._anchor), self._text([*self._anchor, token_id])
        return both[len(before) :] if both.startswith(before) else self._text([token_id])

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


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return which sign a step turns into which text, or None. Pure."""
    if step["type"] == "Metaspace":
        return str(step["replacement"]), " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return str(step["pattern"]["String"]), str(step["content"])
    return None


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
