from __future__ import annotations

import copy

import pytest

from support.template_zoo import SPECIAL, ZOO
from support.tokenizer_zoo import zoo_tokenizer
from trencadis.text import Tokenizer
from trencadis.text.chat import ends_of_turn

FILES = {"generation_config.json": (0,), "config.json": (7, 0)}


def with_template(tokenizer: Tokenizer, source: str | None, *, eos: str | None = None) -> Tokenizer:
    hf = copy.deepcopy(tokenizer._hf)
    hf.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>", "</s>"]})
    hf.eos_token = eos
    hf.chat_template = source
    return Tokenizer(hf)


def test_ends_are_those_of_every_source_each_with_its_sources(tokenizer: Tokenizer) -> None:
    found = ends_of_turn(tokenizer, FILES)
    assert found == {0: ("generation_config.json", "config.json", "tokenizer"), 7: ("config.json",)}


def test_the_tokenizers_own_end_counts_beside_the_configs(tokenizer: Tokenizer) -> None:
    chatml = with_template(tokenizer, None, eos="<|im_end|>")
    assert ends_of_turn(chatml, FILES)[chatml.control_tokens["<|im_end|>"]] == ("tokenizer",)


def test_the_templates_end_counts_where_it_writes_no_other(tokenizer: Tokenizer) -> None:
    chatml = with_template(tokenizer, ZOO["chatml"].source, eos="<|end|>")
    assert ends_of_turn(chatml, FILES)[chatml.control_tokens["<|im_end|>"]] == ("chat template",)


def test_what_ends_a_channel_does_not_end_an_answer(tokenizer: Tokenizer) -> None:
    """As with gpt-oss, whose template ends earlier answers with a token after which an answer goes on."""
    harmony = with_template(tokenizer, ZOO["harmony"].source, eos="</s>")
    end = harmony.control_tokens["</s>"]
    for always_tries in (False, True):
        assert set(ends_of_turn(harmony, {"generation_config.json": (end,)}, always_tries=always_tries)) == {end}


def test_a_template_that_writes_the_tokenizers_end_by_its_name_is_not_tried(tokenizer: Tokenizer) -> None:
    mistral = with_template(tokenizer, ZOO["mistral"].source, eos="</s>")
    end = mistral.control_tokens["</s>"]
    assert ends_of_turn(mistral, {"config.json": (end,)}) == {end: ("config.json", "tokenizer")}
    assert ends_of_turn(mistral, {"config.json": (end,)}, always_tries=True)[end] == (
        "config.json",
        "tokenizer",
        "chat template",
    )


@pytest.mark.parametrize("source", [ZOO["plain"].source, "{{ raise_exception('no') }}", None])
def test_a_template_that_shows_no_end_adds_none(tokenizer: Tokenizer, source: str | None) -> None:
    plain = with_template(tokenizer, source, eos="<|end|>")
    assert set(ends_of_turn(plain, FILES, always_tries=True)) == {0, 7}


def test_special_tokens_of_a_tokenizer_are_known_by_their_text() -> None:
    llama = zoo_tokenizer("mistral")
    assert llama.eos_token_id is not None
    assert llama.control_tokens[SPECIAL["eos_token"]] == llama.eos_token_id  # type: ignore[index]
