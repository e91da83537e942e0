from __future__ import annotations

from typing import Any

from trencadis.text import Tokenizer, encode_chat

HELLO = [{"role": "user", "content": "Hello there"}]


def test_a_text_makes_the_round_trip(serve: Any, tokenizer: Tokenizer) -> None:
    async def use(api: Any) -> tuple[Any, Any]:
        tokens = await api.ok("/tokenize", prompt="Hello € there", return_token_strs=True)
        return tokens, await api.ok("/detokenize", tokens=tokens["tokens"])

    tokens, text = serve(use)
    assert tuple(tokens["tokens"]) == tokenizer.encode("Hello € there")
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 256
    assert text == {"prompt": "Hello € there"}


def test_messages_are_tokenized_as_the_chat_endpoint_does(serve: Any, tokenizer: Tokenizer) -> None:
    async def use(api: Any) -> tuple[Any, Any]:
        closed = await api.ok("/tokenize", messages=HELLO, add_generation_prompt=False)
        return await api.ok("/tokenize", messages=HELLO), closed

    open_, closed = serve(use)
    assert tuple(open_["tokens"]) == encode_chat(tokenizer, HELLO)
    assert tuple(closed["tokens"]) == encode_chat(tokenizer, HELLO, add_generation_prompt=False)


def test_a_long_text_is_encoded_like_a_short_one(serve: Any, tokenizer: Tokenizer) -> None:
    text = "Hello there, you. " * 1000
    assert tuple(serve(lambda api: api.ok("/tokenize", prompt=text))["tokens"]) == tokenizer.encode(text)


def test_a_text_that_no_prompt_could_be_is_not_encoded(serve: Any) -> None:
    async def use(api: Any) -> Any:
        return await api.error("/tokenize", prompt="x" * (256 * 256 + 1))

    status, error = serve(use)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
