from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from trencadis.text import Tokenizer
from trencadis_server.protocol.completions import TextCompletion
from trencadis_testing.fakes import fake_text

PATH = "/v1/completions"


def reference(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_text(prompt, num_tokens, vocab_size=4096)


def text_of(tokenizer: Tokenizer, prompt: tuple[int, ...], num_tokens: int) -> str:
    return tokenizer.decode(reference(prompt, num_tokens), skip_special_tokens=True)


def test_choices_are_in_order_of_prompts_and_usage_is_their_sum(serve: Any, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["Hello", "Good day"], "n": 2, "max_tokens": 5}

    async def use(api: Any) -> tuple[Any, list[Any]]:
        return await api.ok(PATH, **body), await api.events(PATH, **body, stream_options={"include_usage": True})

    answer, events = serve(use)
    msgspec.convert(answer, TextCompletion)
    prompts = [tokenizer.encode(text) for text in body["prompt"]]
    expected = [text_of(tokenizer, prompt, 5) for prompt in prompts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 20
    assert events[-1]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    for event in events:
        msgspec.convert(event, TextCompletion)
    for index, text in enumerate(expected):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine][-1] == "length"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_token_ids_are_prompts(serve: Any, tokenizer: Tokenizer, prompt: Any) -> None:
    answer = serve(lambda api: api.ok(PATH, prompt=prompt, max_tokens=4))
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    assert [choice["text"] for choice in answer["choices"]] == [text_of(tokenizer, tuple(one), 4) for one in prompts]


def test_sixteen_tokens_are_the_default(serve: Any) -> None:
    assert serve(lambda api: api.ok(PATH, prompt=[5]))["usage"]["completion_tokens"] == 16


def test_an_output_beyond_the_model_is_refused_if_it_was_asked_for(serve: Any) -> None:
    status, error = serve(lambda api: api.error(PATH, prompt=[5] * 6, max_tokens=251))
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert "prompt has 6 tokens, and max_tokens asks for 251 more" in error["message"]
    assert serve(lambda api: api.ok(PATH, prompt=[5] * 250))["usage"]["completion_tokens"] == 6  # nobody asked for 16
    assert serve(lambda api: api.ok(PATH, prompt=[5] * 6, max_tokens=250))["usage"]["completion_tokens"] == 250


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_has_the_prompt_before_the_text_and_null_for_its_first_token(serve: Any, n: int) -> None:
    body = {"prompt": "Hello there, you", "max_tokens": 4, "echo": True, "logprobs": 1, "n": n}

    async def use(api: Any) -> tuple[Any, list[Any]]:
        return await api.ok(PATH, **body), await api.events(PATH, **body)

    answer, events = serve(use)
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("Hello there, you")
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
        at = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        assert all(choice["text"][offset:].startswith(token) for token, offset in at)
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for key, values in logprobs.items():
            assert [value for one in mine for value in one["logprobs"][key]] == values


def test_an_echo_alone_scores_the_prompt(serve: Any) -> None:
    answer = serve(lambda api: api.ok(PATH, prompt="Hello there, you", max_tokens=0, echo=True, logprobs=0))
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello there, you"
    assert "".join(choice["logprobs"]["tokens"]) == "Hello there, you"
    assert answer["usage"]["completion_tokens"] == 0


def test_an_echo_of_token_ids_is_their_text(serve: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    answer = serve(lambda api: api.ok(PATH, prompt=list(ids), max_tokens=1, echo=True))
    assert answer["choices"][0]["text"].startswith("Hello there")


def test_the_extensions_of_vllm_have_their_effect(serve: Any, tokenizer: Tokenizer) -> None:
    tokens = reference((5, 6), 8)

    async def use(api: Any) -> tuple[Any, Any]:
        stopped = await api.ok(PATH, prompt=[5, 6], max_tokens=8, stop_token_ids=[tokens[3]], return_token_ids=True)
        scored = await api.ok(PATH, prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=1)
        return stopped["choices"][0], scored["choices"][0]

    stopped, scored = serve(use)
    assert (stopped["token_ids"], stopped["prompt_token_ids"]) == (tokens[:4], [5, 6])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", tokens[3])
    assert scored["prompt_logprobs"][0] is None
    assert [set(one) for one in scored["prompt_logprobs"][1:]] == [{"6"}, {"7"}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": []}, "prompt", "token ids"),
        ({"prompt": [[]]}, "prompt", "token ids"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": True}, "prompt", "must be text"),
        ({"prompt": ""}, None, "no tokens"),
        ({"prompt": [4096]}, None, "vocabulary"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of", "best_of = 1 is below n = 2"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "cannot stream"),
        ({"prompt": "x", "best_of": 129}, "best_of", "128"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "x", "logprobs": 51}, "logprobs", "50"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, None, "logit_bias"),
        ({"prompt": "x", "kv_transfer_params": {"a": "x" * 70_000}}, None, "transfer_params are 70009 bytes"),
        ({"prompt": "x", "kv_transfer_params": [1]}, "kv_transfer_params", "dictionary"),
        ({"prompt": [[5], [5, 99_999]]}, "prompt[1]", "prompt[1]: token id 99999 is outside the vocabulary, 0 to 4095"),
        ({"prompt": "x", "guided_regex": "a", "stream": True}, "guided_regex", "does not constrain tokens"),
        ({"prompt": "x", "no_stop_trim": True}, "no_stop_trim", "not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(serve: Any, body: Any, param: str | None, words: str) -> None:
    status, error = serve(lambda api: api.error(PATH, **body))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert param is None or error["param"] == param
    assert words in error["message"]


def test_of_best_of_n_are_answered_and_all_are_counted(serve: Any, tokenizer: Tokenizer) -> None:
    async def use(api: Any) -> tuple[Any, Any, Any]:
        chosen = await api.ok(PATH, prompt=[[5, 6], [7]], max_tokens=4, n=2, best_of=5)
        scored = await api.ok(PATH, prompt=[5, 6], max_tokens=4, best_of=3, logprobs=1)
        events = await api.events(PATH, prompt=[5, 6], max_tokens=4, n=2, best_of=2)
        return chosen, scored, events

    chosen, scored, events = serve(use)
    assert [choice["index"] for choice in chosen["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in chosen["choices"]] == [
        text_of(tokenizer, prompt, 4) for prompt in ((5, 6), (5, 6), (7,), (7,))
    ]
    assert chosen["usage"]["completion_tokens"] == 2 * 5 * 4
    assert [choice["logprobs"] for choice in chosen["choices"]] == [None] * 4
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 4
    assert scored["usage"]["completion_tokens"] == 12
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}


def test_each_of_best_of_takes_a_place_in_the_server(serve: Any) -> None:
    from trencadis_server.config import ServerConfig

    status, error = serve(lambda api: api.error(PATH, prompt="x", best_of=5), config=ServerConfig(max_requests=4))
    assert (status, "5 texts in one request" in error["message"]) == (400, True)


def test_more_prompts_than_there_is_room_for_are_told_to_come_later(serve: Any) -> None:
    from trencadis_server.config import ServerConfig

    async def use(api: Any) -> Any:
        with api.admission.hold(1, num_requests=3):
            response = await api.post(PATH, prompt=[[1], [2]])
            return response.status_code, response.headers["retry-after"], await api.ok(PATH, prompt=[[1]])

    status, retry_after, answer = serve(use, config=ServerConfig(max_requests=4))
    assert (status, int(retry_after) >= 1) == (429, True)
    assert len(answer["choices"]) == 1


def test_a_prompt_that_fails_takes_the_others_of_its_request_with_it(serve: Any) -> None:
    async def use(api: Any) -> tuple[Any, Any]:
        error = await api.error(PATH, prompt=[[5, 6], [4096]], max_tokens=200)
        return error, await api.until_idle()

    (status, error), (num_used, _) = serve(use)
    assert (status, num_used) == (400, 0)
    assert "4096" in error["message"]


def test_transfer_parameters_go_both_ways_for_the_first_prompt(serve: Any) -> None:
    from support.kv.echo_connector import EchoConnector

    async def use(api: Any) -> tuple[Any, list[Any], Any]:
        body = {"prompt": [[5], [6]], "max_tokens": 3, "kv_transfer_params": {"a": 1}}
        whole = (await api.post(PATH, **body)).json()
        text = (await api.post(PATH, **body, stream=True, n=2)).text
        plain = (await api.post(PATH, prompt=[5], max_tokens=3)).json()
        return whole, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")], plain

    whole, events, plain = serve(use, connector=EchoConnector())
    answer = {"asked": {"a": 1}, "prompt": [5]}
    assert whole["kv_transfer_params"] == answer
    assert "kv_transfer_params" not in plain
    (event,) = [event for event in events if "kv_transfer_params" in event]
    assert event["kv_transfer_params"] == answer
    assert [(one["index"], one["finish_reason"]) for one in event["choices"]] == [(0, "length")]


def test_request_that_is_refused_is_told_to_the_connector(serve: Any) -> None:
    from support.kv.echo_connector import EchoConnector

    echo = EchoConnector()

    async def use(api: Any) -> list[int]:
        bodies = [{"prompt": [5], "nonsense": 1}, {"prompt": [5], "max_tokens": 10**6}, {"prompt": [5], "model": "x"}]
        return [(await api.post(PATH, **body, kv_transfer_params={"a": 1})).status_code for body in bodies]

    assert serve(use, connector=echo) == [400, 400, 404]
    assert echo.rejected == [{"a": 1}] * 3


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"top_k": 5}, "top_k"),
        ({"temperature": 0.7}, "temperature"),
        ({"bad_words": ["sea"]}, "bad_words"),
        ({"best_of": 2, "logit_bias": {"7": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_sampler_does_not_honour_is_refused_with_the_field_of_the_api(
    serve: Any, fake_house: Any, given: dict[str, Any], field: str, stream: bool
) -> None:
    if stream:
        given = {name: value for name, value in given.items() if name != "best_of"}

    async def use(api: Any) -> tuple[int, Any]:
        await api.ok(PATH, prompt="Hello", max_tokens=2, temperature=0, top_p=0.9)
        return await api.error(PATH, prompt="Hello", max_tokens=2, stream=stream, **given)

    status, error = serve(use, sampling="trencadis_testing.backend:ArgmaxSampler")
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert "ArgmaxSampler" in error["message"]
    assert "does not honour it" in error["message"]
