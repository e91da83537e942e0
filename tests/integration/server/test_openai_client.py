"""The official client against the demo model, over loopback."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import openai
import pydantic
import pytest

from support.server.live_server import LiveServer, running
from trencadis import AsyncLLM
from trencadis.client.factory import configure

CHAT: list[Any] = [{"role": "user", "content": "What did the old man see?"}]
PROMPT = "The old man looked at the sea and"


ENGINE = {"max_num_seqs": 64, "warmup": False}
KEYS = ("ann:key-of-ann", "bob:key-of-bob")


def opener(placement: str) -> Any:
    tables = {"engine": {**ENGINE, "placement": placement}, "cache": {"num_blocks": 2048}, "observer": {"names": []}}
    return lambda: AsyncLLM.from_config(*configure("demo", config_file=None, tables=tables))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(opener("thread"), api_keys=KEYS) as made:
        yield made


def client_of(server: LiveServer, key: str = "key-of-ann") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def streamed(chunks: Any, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


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


@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9.0}, openai.BadRequestError, None, "temperature"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter", "temprature"),
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


def test_models_and_embeddings_are_what_the_client_reads(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"
    texts = ["The sea is blue.", "The ocean is blue.", "Tax law."]
    # The client asks for base64 of itself, and decodes it.
    packed, plain = (
        client.embeddings.create(model="demo", input=texts, **more) for more in ({}, {"encoding_format": "float"})
    )
    vectors = np.array([one.embedding for one in packed.data], np.float32)
    np.testing.assert_array_equal(vectors, np.array([one.embedding for one in plain.data], np.float32))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)


def test_the_accumulator_of_the_client_gets_the_same_and_log_probabilities_add_up_to_at_most_one(
    client: openai.OpenAI,
) -> None:
    # The accumulator refuses texts that end by their length.
    request: Any = {
        "model": "demo",
        "messages": CHAT,
        "temperature": 0,
        "stop": ["e"],
        "logprobs": True,
        "top_logprobs": 20,
    }
    whole = client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (whole.message.content, whole.finish_reason)
    assert whole.logprobs is not None
    assert final.logprobs is not None
    assert final.logprobs.content == whole.logprobs.content
    for entry in whole.logprobs.content or []:
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert 0 < sum(np.exp(tops)) <= 1 + 1e-5
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, tops[0])  # greedy


def test_a_full_server_is_a_rate_limit_and_a_wrong_key_an_authentication_error(server: LiveServer) -> None:
    full = server.admission.hold(1, num_requests=server.admission.max_requests)
    with client_of(server) as client, full, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="demo", messages=CHAT)
    with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_keys_and_their_users_share_no_cached_prefix(server: LiveServer) -> None:
    long: Any = [{"role": "user", "content": "Tell me of the sea. " * 20}]

    def num_cached(key: str, **body: Any) -> int:
        with client_of(server, key) as client:
            usage = client.chat.completions.create(model="demo", messages=long, max_completion_tokens=40, **body).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return int(usage.prompt_tokens_details.cached_tokens or 0)

    salted: Any = {"extra_body": {"cache_salt": "own"}}
    assert num_cached("key-of-ann") == 0
    assert num_cached("key-of-ann") > 0
    assert num_cached("key-of-ann", user="her user") == 0
    assert num_cached("key-of-bob") == 0
    assert num_cached("key-of-bob", **salted) == 0
    assert num_cached("key-of-bob", user="his user", **salted) > 0


@pytest.mark.nightly  # of the sampler alone: tests/plugins/trencadis_plugins/sampling/test_grammar.py
def test_a_stream_goes_on_while_anothers_grammar_is_compiled_until_that_is_refused() -> None:
    def poison(server: LiveServer) -> openai.BadRequestError:
        body = {"guided_regex": ".*" * 10_000 + "x"}
        with client_of(server) as client, pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="demo", prompt="x", max_tokens=5, stream=True, extra_body=body)
        return caught.value

    with running(opener("process")) as server, client_of(server) as client, ThreadPoolExecutor(1) as threads:
        client.completions.create(model="demo", prompt="x", max_tokens=1)
        poisoned, num_tokens = threads.submit(poison, server), 0
        while not poisoned.done():
            request: Any = {"prompt": "The sea", "max_tokens": 50, "stream": True, "extra_body": {"ignore_eos": True}}
            for _ in client.completions.create(model="demo", **request):
                num_tokens += not poisoned.done()
    assert num_tokens >= 100
    assert poisoned.result().param == "guided_regex"
    assert "it takes longer than 3 s to compile" in poisoned.result().message
