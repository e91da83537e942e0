"""The proof that token bytes are what the tokenizer decodes."""

from __future__ import annotations

import re

import pytest

from support.tokenizer_zoo import LARGE, TEXTS, ZOO, over_the_zoo, zoo_tokenizer
from trencadis.text import vocabulary_of
from trencadis.text.token_check import token_fault

UNPROVABLE = {"gpt1", "ctrl"}
"""Whether a word ends is written at its end, and the decoder looks whether another token follows."""
NORMALIZED = {
    "qwen_nfc": {"combining"},
    "nfkc": {"combining", "compatibility"},
    "lowercase": {"words", "json", "accents", "compatibility", "upper"},
    "strip": {"trailing_space", "newlines"},
    "unigram_bytes": {"combining", "compatibility", "byte_sign"},
}
"""Texts that the tokenizer writes in another form, wherever they stand."""


@over_the_zoo
def test_every_tokenizer_is_proven_or_named_with_the_tokens_and_both_texts(name: str) -> None:
    vocabulary = vocabulary_of(zoo_tokenizer(name))
    fault = vocabulary.fault()
    assert bool(fault) == (name in UNPROVABLE), fault
    if fault:
        assert re.fullmatch(r"tokens \[\d+, \d+\] have the bytes b.+, and the tokenizer decodes .+", fault)


@over_the_zoo
def test_bytes_of_a_text_within_another_are_the_texts_own_with_no_space_put_before_it(name: str) -> None:
    vocabulary, entry = vocabulary_of(zoo_tokenizer(name)), ZOO[name]
    if not (entry.is_byte_level or entry.has_byte_fallback):
        pytest.skip("it lacks tokens for most characters")
    inexact = {
        key
        for key, text in TEXTS.items()
        if b"".join(vocabulary.tokens[token] for token in vocabulary.encode(text)) != text.encode()
    }
    assert inexact - {"sign_of_space"} == NORMALIZED.get(name, set())


@pytest.mark.parametrize("name", ["gpt2", "llama2", "unigram_bytes", "byt5"])
def test_one_wrong_token_of_all_is_found_and_named(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    tokens = list(vocabulary_of(tokenizer).tokens)
    token = tokenizer.encode_literally("a")[0]
    tokens[token] = b" a"
    fault = token_fault(tokenizer, tokens)
    assert f"{token}" in fault
    assert " a" in fault


def test_tokens_beyond_gaps_in_the_numbers_are_read() -> None:
    vocabulary = vocabulary_of(zoo_tokenizer("byte_level_gaps"))
    assert len(vocabulary.tokens) == 1138
    assert vocabulary.tokens[1137]
    assert vocabulary.tokens[1136] == b""


@pytest.mark.nightly
def test_a_large_vocabulary_is_proven() -> None:
    assert "gemma_262k" in LARGE
    vocabulary = vocabulary_of(zoo_tokenizer("gemma_262k"))
    assert len(vocabulary.tokens) == 262_144
    assert vocabulary.fault() == ""
