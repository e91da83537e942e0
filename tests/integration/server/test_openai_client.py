"""The official client against the demo model, over loopback."""

from __future__ import annotations

import asyncio
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import openai
import pydantic
import pytest
from support.server.openai_server import Running, running

from trencadis import AsyncLLM
from trencadis.client.factory import configure
from trencadis_server.config import ServerConfig

CHAT: list[Any] = [{"role": "user", "content": "What did the old man see?"}]
PROMPT = "The old man looked at the sea and"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    tables = {
        "engine": {"placement": "thread", "max_num_seqs": 64, "warmup": False},
        "cache": {"num_blocks": 2048},
        "observer": {"names": []},
    }
    made = AsyncLLM.from_config(*configure("demo", config_file=None, tables=tables))
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Running]:
    with running(llm, ServerConfig()) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def streamed(chunks: Any, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def until_idle(client: openai.OpenAI, llm: AsyncLLM) -> int:
    """Ask until nothing of others runs any more; each answer gives the server time. Returns the blocks in use."""
    for _ in range(200):
        client.completions.create(model="demo", prompt=[5], max_tokens=1)
        if not llm.num_live:
            break
    engine: Any = llm._runner.frontend.engine
    return int(engine.engine._state.blocks.num_used)


def test_the_server_lists_its_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"


def test_a_chat_is_answered_alike_whole_and_in_a_stream(client: openai.OpenAI) -> None:
    request: Any = {"model": "demo", "messages": CHAT, "max_completion_tokens": 24, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    texts = [choice.message.content for choice in whole.choices]
    assert [streamed(chunks, 0), streamed(chunks, 1)] == texts
    assert texts[0] != texts[1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 48
    *others, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert [chunk.usage for chunk in others] == [None] * len(others)
    assert others[0].choices[0].delta.role == "assistant"
    again = client.chat.completions.create(**request)
    assert [choice.message.content for choice in again.choices] == texts
    assert again.system_fingerprint == whole.system_fingerprint


def test_the_accumulator_of_the_client_gets_the_same(client: openai.OpenAI) -> None:
    # The accumulator refuses texts that end by their length.
    request: Any = {"model": "demo", "messages": CHAT, "temperature": 0, "stop": ["e"]}
    whole = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_stop_string_across_tokens_ends_the_text(client: openai.OpenAI) -> None:
    request: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**request).choices[0].text
    words = text.split(" ")
    stop = f"{words[2][-1]} {words[3][0]}"
    whole = client.completions.create(**request, stop=stop).choices[0]
    chunks = list(client.completions.create(**request, stop=[stop, "\0"], stream=True))
    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_are_sorted_and_add_up_to_at_most_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, max_completion_tokens=8, logprobs=True, top_logprobs=20, temperature=0
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert 0 < sum(np.exp(tops)) <= 1 + 1e-5
        # Greedy: the token is the likeliest one.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, tops[0])
    joined = b"".join(bytes(entry.bytes or []) for entry in content).decode()
    assert joined.removesuffix("<|end|>") == choice.message.content


def test_an_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    request: Any = {"model": "demo", "max_tokens": 4, "echo": True, "logprobs": 5, "temperature": 0}
    (choice,) = client.completions.create(prompt=PROMPT, **request).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert choice.text.startswith(PROMPT)
    assert "".join(logprobs.tokens or []) == choice.text
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:] if value is not None)
    # The output is scored as the prompt is, once it is part of one.
    rescored = client.completions.create(prompt=choice.text, **{**request, "max_tokens": 0}).choices[0].logprobs
    assert rescored is not None
    np.testing.assert_allclose(rescored.token_logprobs[1:], logprobs.token_logprobs[1:], atol=1e-3)


def test_text_and_its_token_ids_are_one_prompt(client: openai.OpenAI, llm: AsyncLLM) -> None:
    ids = list(llm.tokenizer.encode(PROMPT))
    texts = [
        client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in (PROMPT, ids, [PROMPT], [ids])
    ]
    assert len(set(texts)) == 1


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "To be, or not to be: that is"]
    together = client.completions.create(model="demo", prompt=prompts, n=2, max_tokens=6, temperature=0)
    alone = [client.completions.create(model="demo", prompt=one, max_tokens=6, temperature=0) for one in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone for _ in range(2)]


def test_embeddings_are_the_same_in_both_encodings(client: openai.OpenAI, llm: AsyncLLM) -> None:
    texts = ["The sea is blue.", "The ocean is blue.", "Tax law."]
    # The client asks for base64 of itself, and decodes it.
    packed = client.embeddings.create(model="demo", input=texts)
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in packed.data], np.float32)
    np.testing.assert_array_equal(vectors, np.array([one.embedding for one in plain.data], np.float32))
    assert vectors.shape == (3, llm.model.embedding_size)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
    assert packed.usage.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in texts)


def test_headers_have_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=CHAT, max_completion_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"


@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9.0}, openai.BadRequestError, None, "temperature"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter", "temprature"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "tools",
        ),
        (
            {"messages": [{"role": "user", "content": "sea " * 5000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
    ],
)
def test_errors_have_the_classes_of_the_client(
    client: openai.OpenAI, change: Any, error: type[openai.APIStatusError], code: str | None, param: str
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": CHAT, **change})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id


class Sailor(pydantic.BaseModel):
    """What the client asks for with ``parse``."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)
    ships: list[Literal["sloop", "dory"]] = pydantic.Field(max_length=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_client_parses_what_a_class_of_its_own_describes(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=CHAT, response_format=Sailor, temperature=temperature, seed=4, max_completion_tokens=400
    )
    assert answer.choices[0].finish_reason == "stop"
    sailor = answer.choices[0].message.parsed
    assert isinstance(sailor, Sailor)
    with client.chat.completions.stream(
        model="demo", messages=CHAT, response_format=Sailor, temperature=temperature, seed=4, max_completion_tokens=400
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == sailor


class Account(pydantic.BaseModel):
    """Types whose formats JSON Schema does not define."""

    secret: pydantic.SecretStr = pydantic.Field(max_length=8)
    blob: bytes = pydantic.Field(max_length=8)
    home: pathlib.Path = pydantic.Field(json_schema_extra={"maxLength": 8})


def test_the_client_parses_types_whose_formats_say_nothing(client: openai.OpenAI) -> None:
    schema = Account.model_json_schema()["properties"]
    assert [schema[name]["format"] for name in ("secret", "blob", "home")] == ["password", "binary", "path"]
    answer = client.chat.completions.parse(
        model="demo", messages=CHAT, response_format=Account, temperature=0.0, seed=4, max_completion_tokens=600
    )
    assert isinstance(answer.choices[0].message.parsed, Account)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"guided_choice": ["to be", "not to be"]}, "to be|not to be"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "z"'}}, r"a\dz"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
    ],
)
def test_vllms_fields_say_what_a_text_must_be(client: openai.OpenAI, asked: Any, pattern: str) -> None:
    chat = client.chat.completions.create(model="demo", messages=CHAT, extra_body=asked)
    text = client.completions.create(model="demo", prompt=PROMPT, n=3, temperature=2.0, max_tokens=40, extra_body=asked)
    for content in (chat.choices[0].message.content, *(choice.text for choice in text.choices)):
        assert re.fullmatch(pattern, content or "")


@pytest.mark.parametrize("streams", [False, True])
def test_a_schema_that_cannot_be_served_is_an_error_before_anything_runs(client: openai.OpenAI, streams: bool) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: objct") as caught:
        list(client.chat.completions.create(model="demo", messages=CHAT, response_format=schema, stream=streams))
    assert caught.value.type == "invalid_request_error"


def test_samplers_beyond_the_clients_own_parameters_work(client: openai.OpenAI) -> None:
    def tokens(**extra: Any) -> list[int]:
        answer = client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=24,
            seed=3,
            extra_body={"return_token_ids": True, "ignore_eos": True, **extra},
        )
        known = answer.choices[0].model_extra
        assert known is not None
        return [*known["prompt_token_ids"], *known["token_ids"]]

    unique = tokens(temperature=0, no_repeat_ngram_size=1)
    assert len(set(unique[-24:])) == 24
    assert not set(unique[-24:]) & set(unique[:-24])
    assert len(set(tokens(temperature=0)[-24:])) < 24
    assert tokens(top_n_sigma=1e-6) == tokens(temperature=0) != tokens()
    assert tokens(mirostat_mode=2, mirostat_tau=0.5) == tokens(mirostat_mode=2, mirostat_tau=0.5) != tokens()


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"xtc_probability": 2}, "xtc_probability"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"typical_p": 0}, "typical_p"),
    ],
)
def test_impossible_values_of_samplers_are_refused_by_name(client: openai.OpenAI, extra: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=PROMPT, extra_body=extra)
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_logits_processor_that_is_not_enabled_is_refused(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.APIError, match="names 'mine', which is not enabled here"):
        list(
            client.completions.create(
                model="demo", prompt=PROMPT, stream=stream, extra_body={"logits_processors": {"mine": {"strength": 2}}}
            )
        )


def test_a_full_server_and_one_without_an_engine_say_so(server: Running, client: openai.OpenAI) -> None:
    with server.admission.hold(1, num_requests=server.admission.max_requests), pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="demo", messages=CHAT)
    llm, server.engines.current = server.engines.current, None
    try:
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            client.chat.completions.create(model="demo", messages=CHAT)
    finally:
        server.engines.current = llm
    assert caught.value.status_code == 503


def test_a_wrong_key_is_refused_and_keys_share_no_cached_prefix(llm: AsyncLLM) -> None:
    request: Any = {"model": "demo", "messages": CHAT, "max_completion_tokens": 40, "temperature": 0}
    with running(llm, ServerConfig(api_keys=("ann:key-of-ann", "bob:key-of-bob"))) as server:
        with server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()

        def num_cached(key: str, **body: Any) -> int:
            with server.client(api_key=key) as client:
                usage = client.chat.completions.create(**request, **body).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            return int(usage.prompt_tokens_details.cached_tokens or 0)

        long = [{"role": "user", "content": "Tell me of the sea. " * 20}]
        request["messages"] = long
        assert num_cached("key-of-ann") == 0
        assert num_cached("key-of-ann") > 0
        assert num_cached("key-of-ann", user="her user") == 0
        assert num_cached("key-of-bob") == 0
        assert num_cached("key-of-bob", extra_body={"cache_salt": "own"}) == 0
        assert num_cached("key-of-bob", user="his user", extra_body={"cache_salt": "own"}) > 0


def test_a_stream_that_is_left_frees_its_blocks(client: openai.OpenAI, llm: AsyncLLM) -> None:
    with client.chat.completions.create(
        model="demo", messages=CHAT, stream=True, n=4, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
    assert until_idle(client, llm) == 0


@pytest.mark.slow
def test_sixty_four_streams_at_once_say_what_each_says_alone(server: Running, client: openai.OpenAI) -> None:
    prompts = [f"Chapter {i}. {PROMPT}" for i in range(64)]
    request: Any = {"model": "demo", "max_tokens": 12, "temperature": 0}

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:

            async def one(prompt: str) -> str:
                chunks = await client.completions.create(prompt=prompt, stream=True, **request)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    together = asyncio.run(main())
    alone = client.completions.create(prompt=prompts, **request)
    assert together == [choice.text for choice in alone.choices]
