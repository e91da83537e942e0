from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.text.chat import encode_chat
from trencadis.text.model_path import resolve_model_path
from trencadis.text.tokenizer import Tokenizer, load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def without_template(tmp_path: Path) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(resolve_model_path("demo")) / name).read_bytes())
    return load_tokenizer(str(tmp_path))


def test_messages_are_written_as_the_template_says(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = "<|system|>Be brief.<|end|><|user|>Hello<|end|>"
    assert tokenizer.decode(encode_chat(tokenizer, messages)) == expected + "<|assistant|>"
    assert tokenizer.decode(encode_chat(tokenizer, messages, add_generation_prompt=False)) == expected


@pytest.mark.parametrize("messages", [[], "Hello", {"role": "user"}, ["Hello"], [{"content": "Hello"}]])
def test_what_is_no_conversation_is_refused(tokenizer: Tokenizer, messages: object) -> None:
    with pytest.raises(InvalidRequestError, match="message"):
        encode_chat(tokenizer, messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            "hi",
            """messages = 'hi': a chat needs a list of at least one message. Give [{"role": "user", "content": "hi"}].""",
        ),
        (["hi"], """messages[0] = 'hi' is no message. Give [{"role": "user", "content": "hi"}]."""),
        (
            {"role": "user"},
            "messages = {'role': 'user'}: a chat needs a list of at least one message. Give [{'role': 'user'}].",
        ),
        (
            5,
            """messages = 5: a chat needs a list of at least one message. Give [{"role": "user", "content": "..."}].""",
        ),
        (
            [{"content": "a"}],
            """messages[0] = {'content': 'a'} has no role. Give {"role": "user", "content": "..."}.""",
        ),
    ],
)
def test_what_is_no_conversation_is_shown_with_the_right_form(
    tokenizer: Tokenizer, messages: object, said: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode_chat(tokenizer, messages)  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_what_the_template_refuses_is_said_in_its_own_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="unknown role: wizard"):
        encode_chat(tokenizer, [{"role": "wizard", "content": "Hello"}])


def test_a_model_without_template_says_that_it_cannot_chat(without_template: Tokenizer) -> None:
    assert not without_template.chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        encode_chat(without_template, HELLO)


def test_more_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    own = "{{ greeting }} {{ messages[0]['content'] }}"
    ids = encode_chat(tokenizer, HELLO, template_arguments={"greeting": "Oh,", "chat_template": own})
    assert tokenizer.decode(ids) == "Oh, Hello"
