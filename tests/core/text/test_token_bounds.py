"""How much text a token may be, against what tokenizers make of texts of few tokens."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from trencadis.text import load_tokenizer
from trencadis.text.token_bounds import _COMPOSES_AT_MOST, max_bytes_per_token

BYTES = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(**model: Any) -> Tokenizer:
    vocab = {**BYTES, "ab": 256, "abab": 257, "ĠĠ": 258, "ĠĠĠĠ": 259}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def with_fallback() -> Tokenizer:
    vocab = {**FALLBACK, "<unk>": 256, "▁": 257, "a": 258, "▁▁": 259}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "▁")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def added(tokenizer: Tokenizer, token: AddedToken) -> Tokenizer:
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_level(), 4),
        (added(byte_level(), AddedToken("<|end of text|>", special=True)), 15),
        (changed(byte_level(), normalizer=normalizers.NFC()), 4 * _COMPOSES_AT_MOST),
        (with_fallback(), 6),
    ],
)
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer, expected: int) -> None:
    most = max_bytes_per_token(tokenizer)
    assert most == expected

    @given(st.text(st.sampled_from("ab \nÅ\u212b\u0390\u1fef\u0301😀<|endoftext|>"), max_size=60))
    def check(text: str) -> None:
        assert len(text.encode()) <= most * len(tokenizer.encode(text).ids)

    check()


def test_a_real_tokenizer_has_the_length_of_its_longest_token() -> None:
    assert load_tokenizer("demo").max_bytes_per_token == 14
    assert load_tokenizer("none").max_bytes_per_token is None


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (changed(byte_level(), normalizer=normalizers.StripAccents()), "e" + "\u0301" * 1000),
        (changed(byte_level(), normalizer=normalizers.Strip()), " " * 1000),
        (changed(byte_level(), normalizer=normalizers.Replace("a" * 8, "a")), "a" * 1000),
        (
            changed(
                byte_level(),
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                ),
            ),
            " " * 1000,
        ),
        (changed(byte_level(), pre_tokenizer=pre_tokenizers.Whitespace()), " " * 1000),
        (added(byte_level(), AddedToken("<mask>", lstrip=True)), " " * 1000 + "<mask>"),
        (Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]")), "x" * 1000),
        (Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True)), "x" * 1000),
        (
            changed(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), pre_tokenizer=pre_tokenizers.ByteLevel()),
            "x" * 1000,
        ),
    ],
)
def test_there_is_no_bound_where_text_is_lost_or_joined(tokenizer: Tokenizer, text: str) -> None:
    assert max_bytes_per_token(tokenizer) is None
    assert len(tokenizer.encode(text).ids) < 1000 / 4


def test_a_tokenizer_that_cuts_has_no_bound() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    assert max_bytes_per_token(tokenizer) is None


@pytest.mark.nightly
def test_composing_shrinks_no_text_more_than_is_assumed() -> None:
    """Each character of the composed text, and the longest spelling of each part of it."""
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    spelt: defaultdict[str, int] = defaultdict(int)
    for character in characters:
        part = unicodedata.normalize("NFD", character)
        if len(part) == 1:
            spelt[part] = max(spelt[part], len(character.encode()), len(part.encode()))
    for form in ("NFC", "NFD"):
        for character in characters:
            composed = unicodedata.normalize(form, character)
            parts = unicodedata.normalize("NFD", character)
            assert sum(spelt[part] for part in parts) <= _COMPOSES_AT_MOST * len(composed.encode())
