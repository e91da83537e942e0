"""The tokenizers that other tests take as examples are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.tokenizer_zoo import LARGE, TEXTS, ZOO, over_the_zoo, zoo_tokenizer


@over_the_zoo
def test_an_entry_of_the_zoo_is_what_it_says(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LARGE)
def test_a_large_entry_is_what_it_says(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


def _check(name: str, tmp_path: Path) -> None:
    entry, tokenizer = (ZOO | LARGE)[name], zoo_tokenizer(name)
    assert (tokenizer.byte_table is not None) == entry.is_byte_level
    assert (tokenizer.byte_fallback is not None) == entry.has_byte_fallback
    lost = {key for key, text in TEXTS.items() if text != _there_and_back(name, text)}
    assert lost == set(TEXTS) - set(entry.texts) if entry.loses is not None else lost
    entry.make(tmp_path / "model")
    model = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    highest = model["vocab_size"] - 1 - entry.num_padding_ids
    assert tokenizer.knows(highest)
    assert entry.is_slow or not tokenizer.knows(highest + 1)


def _there_and_back(name: str, text: str) -> str:
    tokenizer = zoo_tokenizer(name)
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True)
