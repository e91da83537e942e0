from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.kv.echo_connector import EchoConnector
from trencadis.text import Tokenizer
from trencadis_server.config import ServerConfig
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


def test_more_prompts_than_there_is_room_for_are_told_to_come_later(serve: Any) -> None:
    async def use(api: Any) -> Any:
        with api.admission.hold(1, num_requests=3):
            response = await api.post(PATH, prompt=[[1], [2]])
            return response.status_code, response.headers["retry-after"], await api.ok(PATH, prompt=[[1]])

    status, retry_after, answer = serve(use, config=ServerConfig(max_requests=4))
    assert (status, int(retry_after) >= 1) == (429, True)
    assert len(answer["choices"]) == 1


def test_request_that_is_refused_is_told_to_the_connector(serve: Any) -> None:
    echo = EchoConnector()

    async def use(api: Any) -> list[int]:
        bodies = [{"prompt": [5], "nonsense": 1}, {"prompt": [5], "max_tokens": 10**6}, {"prompt": [5], "model": "x"}]
        return [(await api.post(PATH, **body, kv_transfer_params={"a": 1})).status_code for body in bodies]

    assert serve(use, connector=echo) == [400, 400, 404]
    assert echo.rejected == [{"a": 1}] * 3


def test_sixteen_tokens_are_the_default_where_there_is_room_for_them(serve: Any) -> None:
    async def use(api: Any) -> list[int]:
        bodies = [{"prompt": [5]}, {"prompt": [5] * 250}, {"prompt": [5] * 6, "max_tokens": 250}]
        return [(await api.ok(PATH, **body))["usage"]["completion_tokens"] for body in bodies]

    assert serve(use) == [16, 6, 250]


def test_each_of_best_of_and_each_beam_takes_a_place_in_the_server(serve: Any) -> None:
    async def use(api: Any) -> list[Any]:
        bodies = [{"prompt": "x", "best_of": 5}, {"prompt": [[1], [2]], "use_beam_search": True, "n": 3}]
        return [await api.error(PATH, **body) for body in bodies]

    (best, of_best), (beams, of_beams) = serve(use, config=ServerConfig(max_requests=4))
    assert (best, beams) == (400, 400)
    assert "5 texts in one request" in of_best["message"]
    assert "6 texts in one request" in of_beams["message"]


def test_what_the_sampler_does_not_honour_is_refused_with_the_field_of_the_api(serve: Any) -> None:
    fields = {"top_k": 5, "temperature": 0.7, "bad_words": ["sea"], "logit_bias": {"7": 1}}

    async def use(api: Any) -> list[Any]:
        await api.ok(PATH, prompt="Hello", max_tokens=2, temperature=0, top_p=0.9)
        more: list[dict[str, Any]] = [{"stream": True}, {"best_of": 2}]
        return [await api.error(PATH, prompt="Hello", **{name: fields[name]}, **one) for name in fields for one in more]

    found = serve(use, sampling="trencadis_testing.backend:ArgmaxSampler")
    assert [(status, error["param"]) for status, error in found] == [(400, name) for name in fields for _ in range(2)]
    assert all("ArgmaxSampler" in one["message"] and "does not honour it" in one["message"] for _, one in found)
