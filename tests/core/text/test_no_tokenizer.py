"""A model that is served without a tokenizer: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis.registry import Registry
from trencadis.text import Detokenizer, load_tokenizer, vocabulary_of
from trencadis_testing.fakes import fake_text


@pytest.fixture
def llm(fake_house: Callable[..., tuple[Config, Registry]]) -> Iterator[LLM]:
    config, registry = fake_house()
    config = attrs.evolve(config, model=attrs.evolve(config.model, tokenizer="none"))
    with LLM.from_config(config, registry) as made:
        yield made


def test_token_ids_are_continued_as_with_a_tokenizer_and_have_no_text(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(max_tokens=6, logprobs=1))
    expected = tuple(fake_text([5, 6], 6, vocab_size=llm.model.vocab_size, eos=-1))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (expected, "")


@pytest.mark.parametrize(
    ("prompt", "params", "what"),
    [
        ("Hello", {}, "a text as prompt"),
        ([5], {"stop": ("x",)}, "a stop string"),
    ],
)
def test_what_needs_text_is_refused(llm: LLM, prompt: Any, params: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{what} needs a tokenizer.*model.tokenizer = 'none'"):
        llm.generate(prompt, SamplingParams(max_tokens=2, **params))


def test_chat_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_components_that_ask_for_the_vocabulary_are_refused_in_words() -> None:
    with pytest.raises(InvalidRequestError, match="the vocabulary needs a tokenizer"):
        vocabulary_of(load_tokenizer("none"))


def test_a_detokenizer_of_nothing_yields_nothing() -> None:
    detokenizer = Detokenizer(load_tokenizer("none"), prompt_token_ids=(1, 2))
    assert detokenizer.add([3, 4]) + detokenizer.flush() == ""
