"""Proves that token bytes are what the tokenizer decodes: constraints on text are kept by bytes, and clients read what is decoded.

every token, beside others ─▶ decoded ═?═ bytes joined
texts of many scripts, encoded ─▶ decoded ═?═ bytes joined
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trencadis.faults import shown
from trencadis.text.tokenizer import Tokenizer

__all__ = ["token_fault"]

_RUN = 64
"""Tokens that are decoded together."""

_TEXTS = (
    'The sea, "quoted": {"a": [1, -2.5e3, null]}\\n',
    "  two  spaces\tand a\nline\r\nend ",
    "don't do not , . ! ? it 's we 're a - b",
    "Schöne Grüße, naïve façade ﬁ Å",
    "你好，世界。 こんにちは 안녕하세요",
    "Привет مرحبا שלום नमस्ते",
    "😀😁👩‍👩‍👧 🇪🇸 e\u0301",
    "UPPER lower MiXeD 0123456789 <tag> </tag> $x_{i}^2$",
)


def token_fault(tokenizer: Tokenizer, tokens: Sequence[bytes]) -> str:
    """Return why the bytes of tokens, joined, are not what the tokenizer decodes; empty: they are. Pure; O(vocabulary).

    Tokens that are control signs, and those without bytes, are left out: they write no text.

    Args:
        tokenizer: Has texts.
        tokens: Bytes of each token id.
    """
    for run in _runs(tokenizer, tokens):
        if tokenizer.added_by(run) != _joined(tokens, run):
            return _fault_in(tokenizer, tokens, run)
    return ""


def _runs(tokenizer: Tokenizer, tokens: Sequence[bytes]) -> Iterator[list[int]]:
    """Yield sequences of tokens that have text."""
    byte_ids = frozenset() if tokenizer.byte_fallback is None else tokenizer.byte_fallback.byte_of.keys()
    skipped = tokenizer.special_token_ids | byte_ids
    ids = [token for token, data in enumerate(tokens) if data and token not in skipped]
    num_runs = -(-len(ids) // _RUN)
    for first in range(num_runs):
        yield ids[first::num_runs]
    # A byte of a character alone has no text, and a decoder may read a run of them as a whole: they are tried as text has them.
    of_byte = {tokens[token]: token for token in byte_ids}
    for text in _TEXTS:
        spelt = [of_byte.get(bytes([byte]), -1) for byte in text.encode()]
        if -1 not in spelt:
            yield spelt
        ids = [token for token in tokenizer.encode_literally(text) if token < len(tokens) and tokens[token]]
        if not tokenizer.special_token_ids.intersection(ids):
            yield ids


def _joined(tokens: Sequence[bytes], run: Sequence[int]) -> str:
    return b"".join(tokens[token] for token in run).decode(errors="replace")


def _fault_in(tokenizer: Tokenizer, tokens: Sequence[bytes], run: list[int]) -> str:
    """Return the first difference in a run, in words: the tokens, their bytes, and the text that they are decoded to."""
    end = next(end for end in range(1, len(run) + 1) if tokenizer.added_by(run[:end]) != _joined(tokens, run[:end]))
    # Most often the last one alone, or with the one before it, shows the same.
    begin = next(
        (
            one
            for one in (end - 1, end - 2)
            if one > 0 and tokenizer.added_by(run[one:end]) != _joined(tokens, run[one:end])
        ),
        0,
    )
    part = run[begin:end]
    named = f"token {part[0]} has" if len(part) == 1 else f"tokens {shown(part)} have"
    data = b"".join(tokens[token] for token in part)
    return f"{named} the bytes {shown(data)}, and the tokenizer decodes {shown(tokenizer.added_by(part))}"
