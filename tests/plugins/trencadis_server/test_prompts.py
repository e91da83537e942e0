from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.tokenizer_zoo import zoo_tokenizer
from trencadis.text import Tokenizer
from trencadis_server.context import Encoder
from trencadis_server.errors import ApiError
from trencadis_server.generation.prompts import check_room, echoes, encode_inputs, truncated
from trencadis_server.protocol.completions import CompletionRequest


def encode(tokenizer: Tokenizer, inputs: Any, *, is_cut: bool = False) -> list[tuple[int, ...]]:
    async def main() -> list[tuple[int, ...]]:
        llm: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=16, model=SimpleNamespace(vocab_size=97))
        return await encode_inputs(
            inputs, llm=llm, encoder=Encoder(), add_special_tokens=True, is_cut=is_cut, param="prompt"
        )

    return asyncio.run(main())


def test_every_form_of_input_becomes_a_list_of_prompts(tokenizer: Tokenizer) -> None:
    hello, you = tokenizer.encode("Hello"), tokenizer.encode("you")
    assert encode(tokenizer, "Hello") == [hello]
    assert encode(tokenizer, ["Hello", "you"]) == [hello, you]
    assert encode(tokenizer, [5, 6]) == [(5, 6)]
    assert encode(tokenizer, [[5, 6], [7]]) == [(5, 6), (7,)]


@pytest.mark.parametrize(("inputs", "param"), [([5, 97], "prompt"), ([[5], [97, 6]], "prompt[1]")])
def test_a_token_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, inputs: Any, param: str) -> None:
    with pytest.raises(ApiError, match="token id 97 is outside the vocabulary, 0 to 96") as caught:
        encode(tokenizer, inputs)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_text_that_is_surely_too_long_is_not_even_encoded(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="has 4097 characters") as caught:
        encode(tokenizer, "x" * 4097)
    assert caught.value.code == "context_length_exceeded"
    assert encode(tokenizer, "x" * 4097, is_cut=True) == [tokenizer.encode("x" * 4097)]


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"),
    [(None, 4, 12), (3, 4, 3), (99, 4, 12), (-1, 4, 6), (-1, None, 9), (-1, 99, 1), (0, 4, 0)],
)
def test_truncation_keeps_the_end(tokenizer: Tokenizer, limit: int | None, max_tokens: int | None, kept: int) -> None:
    prompt = tuple(range(12))
    result = truncated(prompt, limit, tokenizer=tokenizer, max_model_len=10, max_tokens=max_tokens)
    assert result == prompt[12 - kept :]


@pytest.mark.parametrize(
    ("prompt", "limit", "kept"),
    [
        ((1, 5, 6, 7, 8, 9), 4, (1, 7, 8, 9)),
        ((1, 5, 6, 7, 8, 9), -1, (1, 7, 8, 9)),
        ((1, 5, 6, 7, 8, 9), 1, (9,)),  # no room for more than it
        ((1, 5, 6, 7, 8, 9), 6, (1, 5, 6, 7, 8, 9)),
        ((5, 6, 7, 8, 9), 3, (7, 8, 9)),  # it does not begin with it
        ((1,), 1, (1,)),
    ],
)
def test_truncation_keeps_the_beginning_of_sequence(prompt: tuple[int, ...], limit: int, kept: tuple[int, ...]) -> None:
    tokenizer = zoo_tokenizer("llama2")
    assert tokenizer.opening == (1,)
    assert truncated(prompt, limit, tokenizer=tokenizer, max_model_len=6, max_tokens=2) == kept


def test_a_prompt_may_fill_all_but_the_room_for_the_output() -> None:
    check_room([(1,) * 9], max_model_len=10, num_output=1, param="prompt")
    check_room([(1,) * 10], max_model_len=10, num_output=0, param="input")
    with pytest.raises(ApiError, match=r"prompt has 10 tokens, and at least 1 more") as caught:
        check_room([(1,) * 10], max_model_len=10, num_output=1, param="prompt")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    check_room([(1,) * 4], max_model_len=10, num_output=6, param="prompt")
    with pytest.raises(ApiError, match=r"prompt has 4 tokens, and max_tokens asks for 7 more: .* 10 tokens") as caught:
        check_room([(1,) * 4], max_model_len=10, num_output=7, param="prompt")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ApiError, match=r"input\[1\] has no tokens"):
        check_room([(1,), ()], max_model_len=10, num_output=0, param="input")


def test_only_what_would_help_is_proposed() -> None:
    with pytest.raises(ApiError, match="Shorten the prompt or set truncate_prompt_tokens") as caught:
        check_room([(1,) * 10], max_model_len=10, num_output=1, param="prompt")
    assert "max_tokens" not in caught.value.message
    with pytest.raises(ApiError, match=r"^limit asks for 10 tokens: .* Lower or leave out limit\.$") as caught:
        check_room([(1,)], max_model_len=10, num_output=10, param="prompt", output_param="limit")
    assert (caught.value.param, caught.value.code) == ("limit", "context_length_exceeded")


def test_one_token_is_one() -> None:
    with pytest.raises(ApiError, match=r"prompt has 1 token, .* length is 1 token, prompt"):
        check_room([(1,)], max_model_len=1, num_output=1, param="prompt")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "Hello"}, [None]),
        ({"prompt": "Hello", "echo": True}, ["Hello"]),
        ({"prompt": ["Hello", "you"], "echo": True}, ["Hello", "you"]),
        ({"prompt": "Hello", "echo": True, "truncate_prompt_tokens": 1}, [None]),
    ],
)
def test_an_echo_is_the_text_as_it_came_unless_it_was_cut(tokenizer: Tokenizer, body: Any, expected: Any) -> None:
    request = CompletionRequest(model="m", **body)
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    prompts = [tokenizer.encode(str(text)) for text in texts]
    if request.truncate_prompt_tokens:
        prompts = [prompt[-1:] for prompt in prompts]
        expected = [tokenizer.decode(prompt) for prompt in prompts]
    assert echoes(request, prompts, tokenizer) == expected


class Counting(Encoder):
    """Notes how much work it is given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []

    async def run(self, call: Any, *, num_characters: int) -> Any:
        self.pieces.append(num_characters)
        return await super().run(call, num_characters=num_characters)


def test_many_short_texts_are_one_long_piece_of_work(tokenizer: Tokenizer) -> None:
    encoder = Counting()
    llm: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=16)
    texts = ["the sea"] * 500
    prompts = asyncio.run(
        encode_inputs(texts, llm=llm, encoder=encoder, add_special_tokens=True, is_cut=False, param="prompt")
    )
    assert encoder.pieces == [3500]
    assert prompts == [tokenizer.encode("the sea")] * 500


@pytest.mark.parametrize(("inputs", "param"), [("", "prompt"), (["a", ""], "prompt[1]")])
def test_a_text_without_tokens_is_named(tokenizer: Tokenizer, inputs: Any, param: str) -> None:
    with pytest.raises(ApiError, match="has no tokens") as caught:
        encode(tokenizer, inputs)
    assert (caught.value.status, caught.value.param) == (400, param)
