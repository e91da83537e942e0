"""How many bytes of a text one token may stand for: a text of more than that many for each token that fits is too long, unencoded.

The bound exists only where nothing of a text is lost before it is divided into tokens: then each byte is in some token, and no token
is longer than the longest of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["max_bytes_per_token"]

_COMPOSES_AT_MOST = 4
"""Bytes of a text for one of its NFC or NFD. Found by trying all characters of Unicode, in this module's test: 3.5."""

_COMPOSING = frozenset({"NFC", "NFD"})
_KEEPING = frozenset({"Prepend", "ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"})


def max_bytes_per_token(fast: Any) -> int | None:
    """Return the most UTF-8 bytes of a text that become one token; None: there is no bound, or it is not known. Pure.

    Args:
        fast: A tokenizer of tokenizers; None: of another kind.
    """
    if fast is None or fast.truncation is not None:
        return None
    steps = [*_steps(fast.normalizer), *_steps(fast.pre_tokenizer)]
    added = fast.get_added_tokens_decoder().values()
    # A token with lstrip or rstrip takes in all the spaces around it.
    if not all(map(_keeps_text, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = fast.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not _has_every_byte(fast.model, vocabulary, is_byte_level=is_byte_level):
        return None
    # A character of a byte-level token stands for one byte; one of another token for no more than its own bytes.
    longest = max(map(len, vocabulary)) if is_byte_level else max(len(token.encode()) for token in vocabulary)
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return longest * _COMPOSES_AT_MOST if any(step["type"] in _COMPOSING for step in steps) else longest


def _has_every_byte(model: Any, vocabulary: dict[str, int], *, is_byte_level: bool) -> bool:
    """Return whether there is a token for each byte, so that none is dropped or joins others in an unknown token. Pure."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(model, BPE):
        return False
    if is_byte_level:
        return all(character in vocabulary for character in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a step before the division into tokens keeps every byte of a text, except where it composes characters. Pure."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in _COMPOSING or (step["type"] in _KEEPING and step.get("behavior") != "Removed")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield what a normalizer or pre-tokenizer of tokenizers does, in order."""
    # The state that pickle would store is the part of tokenizer.json; there is no other face.
    return iter(()) if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers", step.get("pretokenizers", ())):
        yield from _flat(inner)
