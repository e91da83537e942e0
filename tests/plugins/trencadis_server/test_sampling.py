"""Fields of requests as parameters of sampling and of beam search."""

from __future__ import annotations

from typing import Any

import pytest

from support.tokenizer_zoo import zoo_tokenizer
from trencadis.errors import InvalidRequestError
from trencadis.records import BeamSearchParams, SamplingParams
from trencadis.text import Tokenizer
from trencadis_server.errors import ApiError
from trencadis_server.generation.sampling import beam_params, http_field, sampling_params
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.completions import CompletionRequest
from trencadis_server.protocol.generation import GenerationRequest


def params(tokenizer: Tokenizer, max_tokens: int | None = 16, **body: Any) -> SamplingParams:
    request = GenerationRequest.model_validate({"model": "m", **body})
    return sampling_params(request, tokenizer=tokenizer, max_tokens=max_tokens, logprobs=None, prompt_logprobs=None)


def test_a_request_without_fields_has_the_defaults(tokenizer: Tokenizer) -> None:
    assert params(tokenizer) == SamplingParams()
    assert params(tokenizer, temperature=None, n=None, stop=None) == SamplingParams()


def test_fields_have_the_meaning_of_their_names(tokenizer: Tokenizer) -> None:
    same = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.001,
        "eta_cutoff": 0.002,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat_mode": 2,
        "mirostat_tau": 3.0,
        "mirostat_eta": 0.2,
        "dry_base": 1.5,
        "dry_allowed_length": 4,
        "dry_range": 100,
        "no_repeat_ngram_size": 3,
        "logits_processors": {"mine": {"strength": 2}},
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "allowed_token_ids": [5, 6],
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 9,
        "max_draft_tokens": 0,
        "stop": ["a", "b"],
    }
    assert params(tokenizer, **same, logit_bias={"5": 1.5}) == SamplingParams(**same, logit_bias={5: 1.5})
    assert params(tokenizer, stop="a").stop == ("a",)
    assert params(tokenizer, max_tokens=None).max_tokens is None


def test_a_negative_seed_is_a_seed(tokenizer: Tokenizer) -> None:
    assert params(tokenizer, seed=-1).seed == 2**63 - 1
    assert params(tokenizer, seed=-1) == params(tokenizer, seed=-1)


def test_a_banned_word_is_banned_at_the_beginning_and_behind_a_space(tokenizer: Tokenizer) -> None:
    (bare,) = tokenizer.encode("the")
    (spaced,) = tokenizer.encode(" the")
    assert set(params(tokenizer, bad_words=["the"]).bad_token_ids) == {bare, spaced}


def test_a_banned_word_of_several_tokens_is_banned_as_a_whole(tokenizer: Tokenizer) -> None:
    word = "antidisestablishment"
    asked = params(tokenizer, bad_words=["the", word])
    assert asked.bad_words_ids == (tuple(tokenizer.encode(word)), tuple(tokenizer.encode(f" {word}")))
    assert len(asked.bad_words_ids[0]) > 1
    assert len(asked.bad_token_ids) == 2


@pytest.mark.parametrize("name", ["llama2", "mistral", "gpt2_prefix_space", "metaspace_first"])
def test_a_bad_word_is_banned_without_a_space_before_it_too_where_the_tokenizer_puts_one_before_a_text(name):
    """As it stands after a quotation mark or at the beginning of a line."""
    tokenizer = zoo_tokenizer(name)
    banned = params(tokenizer, bad_words=["hello"])
    words = {*banned.bad_words_ids, *((token,) for token in banned.bad_token_ids)}
    texts = {b"".join(map(tokenizer.token_bytes, word)) for word in words}
    assert {b"hello", b" hello"} <= texts


def test_a_banned_word_without_tokens_is_refused() -> None:
    class Mute:
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            raise InvalidRequestError(f"{text!r} has no tokens")

    with pytest.raises(ApiError, match=r"bad_words\[0\] = 'the' has no tokens"):
        params(Mute(), bad_words=["the"])  # type: ignore[arg-type]


def test_a_run_of_tokens_breaks_at_the_usual_marks_unless_others_are_named(tokenizer: Tokenizer) -> None:
    assert params(tokenizer).dry_breaker_token_ids == ()
    usual = params(tokenizer, dry_multiplier=0.8).dry_breaker_token_ids
    assert usual == tuple(tokenizer.encode(f"a{text}", add_special_tokens=False)[-1] for text in '\n:"*')
    assert params(tokenizer, dry_multiplier=0.8, dry_sequence_breakers=[]).dry_breaker_token_ids == ()
    named = params(tokenizer, dry_multiplier=0.8, dry_sequence_breakers=["."]).dry_breaker_token_ids
    assert named == (tokenizer.encode("a.", add_special_tokens=False)[-1],)


@pytest.mark.parametrize(
    ("name", "field"),
    [("stop_token_ids", "stop_token_ids"), ("bad_words_ids", "bad_words"), ("structured", "guided_regex")],
)
def test_a_parameter_is_called_as_the_client_calls_it(name: str, field: str) -> None:
    assert http_field(GenerationRequest.model_validate({"model": "m", "guided_regex": "a"}), name) == field


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


def test_choices_are_the_beams_of_each_prompt_best_first(serve: Any) -> None:
    body = {"prompt": [[5, 6], [7]], "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 3, "logprobs": 1}
    answer = serve(lambda api: api.ok(PATH, **body, return_token_ids=True, ignore_eos=True))
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
    answer = serve(
        lambda api: api.ok(
            CHAT, messages=MESSAGES, use_beam_search=True, n=2, max_tokens=2, logprobs=True, ignore_eos=True
        )
    )
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [2, 2]


def test_a_failure_of_a_beam_is_the_requests(serve: Any) -> None:
    def fails(batch: Any, one: Any) -> None:
        raise RuntimeError("too many numbers")

    status, error = serve(lambda api: api.error(PATH, prompt=[5], use_beam_search=True, n=2, max_tokens=2), fails=fails)
    assert (status, "too many numbers" in error["message"]) == (500, True)
