from __future__ import annotations

from collections.abc import Callable

import pytest

from trencadis.config import Config
from trencadis.config.schema import ModelConfig
from trencadis.errors import ModelLoadError
from trencadis.text import Tokenizer, model_finder, vocabulary_of, vocabulary_reader


def test_every_token_has_its_bytes_and_ends_are_known(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary.tokens) == tokenizer.vocab_size == 4096
    text = "Schöne Grüße, 世界 😀\n"
    assert b"".join(vocabulary.tokens[i] for i in tokenizer.encode(text)).decode() == text
    assert vocabulary.eos_token_id == 0
    assert {0, 1, 2, 3} <= vocabulary.special_token_ids
    assert vocabulary.tokens[0] == b"<|end|>"


@pytest.mark.parametrize("text", ["plain", "<|end|> of <|user|>", "é<|end|>"])
def test_control_signs_in_a_text_are_spelt_out(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = vocabulary_of(tokenizer)
    ids = vocabulary.encode(text)
    assert not set(ids) & vocabulary.special_token_ids
    assert b"".join(vocabulary.tokens[i] for i in ids).decode() == text
    assert vocabulary.encode("") == ()


def test_a_tokenizer_is_loaded_when_it_is_asked_for_and_once() -> None:
    read = vocabulary_reader(Config(model=ModelConfig(path="demo")))
    assert read() is read()
    nowhere: Callable[[], object] = vocabulary_reader(Config(model=ModelConfig(path="/no/such/model")))
    with pytest.raises(ModelLoadError):
        nowhere()


def test_a_tokenizer_of_its_own_is_the_one_that_counts() -> None:
    read = vocabulary_reader(Config(model=ModelConfig(path="/no/such/model", tokenizer="demo")))
    assert len(read().tokens) == 4096


def test_a_further_model_is_found_as_the_engine_s_own_and_read_when_it_is_asked_for() -> None:
    find = model_finder(Config(model=ModelConfig(path="/no/such/model", dtype="float16", trust_remote_code=True)))
    draft = find("demo-draft")
    assert draft.source.path.endswith("draft")
    assert (draft.source.dtype, draft.source.trust_remote_code) == ("float16", True)
    assert len(draft.vocabulary().tokens) == 4096
    missing = find("/no/such/model")
    with pytest.raises(ModelLoadError):
        missing.vocabulary()
