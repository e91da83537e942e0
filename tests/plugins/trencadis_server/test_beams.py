from __future__ import annotations

from typing import Any

import pytest

from trencadis.records import BeamSearchParams
from trencadis_server.generation.beams import beam_params
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.completions import CompletionRequest

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def params_of(**body: Any) -> BeamSearchParams | None:
    return beam_params(CompletionRequest(model="demo", prompt="x", **body), max_tokens=9, logprobs=body.get("logprobs"))


def test_what_is_asked_for_becomes_the_parameters_of_the_search() -> None:
    body = {
        "use_beam_search": True,
        "n": 2,
        "best_of": 5,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 3,
    }
    assert params_of(**body) == BeamSearchParams(
        beam_width=5,
        n=2,
        max_tokens=9,
        length_penalty=0.5,
        early_stopping="never",
        stop_token_ids=(7,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
    )


def test_without_best_of_there_are_as_many_beams_as_choices() -> None:
    params = params_of(use_beam_search=True, n=3)
    assert params is not None
    assert (params.beam_width, params.num_returned, params.early_stopping, params.length_penalty) == (3, 3, False, 1.0)
    chat = ChatRequest(model="demo", messages=MESSAGES, use_beam_search=True, n=2)  # type: ignore[arg-type]
    params = beam_params(chat, max_tokens=None, logprobs=None)
    assert params is not None
    assert (params.beam_width, params.max_tokens) == (2, None)


@pytest.mark.parametrize("body", [{}, {"use_beam_search": False}, {"length_penalty": 1.0, "early_stopping": False}])
def test_who_does_not_ask_for_it_gets_none(body: dict[str, Any]) -> None:
    assert params_of(**body) is None


def test_what_asks_for_nothing_is_no_obstacle() -> None:
    idle = {"temperature": 0.0, "top_p": 1.0, "seed": 5, "presence_penalty": 0.0, "logit_bias": {}, "min_tokens": 0}
    idle["response_format"] = {"type": "text"}
    assert params_of(use_beam_search=True, n=2, user="me", **idle) == params_of(use_beam_search=True, n=2)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stream": True}, "stream", "cannot stream"),
        ({"temperature": 0.7}, "temperature", "draws nothing"),
        ({"top_p": 0.5}, "top_p", "draws nothing"),
        ({"stop": ["a"]}, "stop", "draws nothing"),
        ({"bad_words": ["a"]}, "bad_words", "draws nothing"),
        ({"response_format": {"type": "json_object"}}, "response_format", "draws nothing"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "draws nothing"),
        ({"echo": True, "logprobs": 1}, "echo", "not answered"),
        ({"best_of": 1}, "best_of", "best_of = 1 is below n = 2"),
        ({"logprobs": 3}, "logprobs", "width of 2 knows 2"),
        ({"n": 50}, None, "beam_width = 50"),
        ({"length_penalty": 11}, "length_penalty", "10"),
        ({"early_stopping": "soon"}, "early_stopping", 'true, false or "never"'),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty", "needs use_beam_search"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping", "needs use_beam_search"),
    ],
)
def test_what_cannot_be_is_refused_in_words(serve: Any, body: Any, param: str | None, words: str) -> None:
    given = {"prompt": "x", "use_beam_search": True, "n": 2, **body}
    status, error = serve(lambda api: api.error(PATH, **given))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert param is None or error["param"] == param
    assert words in error["message"]


def test_choices_are_the_beams_of_each_prompt_best_first(serve: Any) -> None:
    body = {"prompt": [[5, 6], [7]], "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 3, "logprobs": 1}
    answer = serve(lambda api: api.ok(PATH, **body, return_token_ids=True))
    # The fake backend offers tokens 0, 1, 2 ... each with log-probability -1.
    assert [(one["index"], one["token_ids"]) for one in answer["choices"]] == [
        (0, [0, 0, 0]),
        (1, [0, 0, 1]),
        (2, [0, 0, 0]),
        (3, [0, 0, 1]),
    ]
    assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 4
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 3


def test_a_chat_is_searched_too(serve: Any) -> None:
    answer = serve(lambda api: api.ok(CHAT, messages=MESSAGES, use_beam_search=True, n=2, max_tokens=2, logprobs=True))
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [2, 2]


def test_every_beam_takes_a_place_in_the_server(serve: Any) -> None:
    from trencadis_server.config import ServerConfig

    async def use(api: Any) -> Any:
        return await api.error(PATH, prompt=[[1], [2]], use_beam_search=True, n=3)

    status, error = serve(use, config=ServerConfig(max_requests=5))
    assert (status, "6 texts in one request" in error["message"]) == (400, True)


def test_a_failure_of_a_beam_is_the_requests(serve: Any) -> None:
    def fails(batch: Any, one: Any) -> None:
        raise RuntimeError("too many numbers")

    status, error = serve(lambda api: api.error(PATH, prompt=[5], use_beam_search=True, n=2, max_tokens=2), fails=fails)
    assert (status, "too many numbers" in error["message"]) == (500, True)
