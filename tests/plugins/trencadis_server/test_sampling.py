from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis.text import Tokenizer
from trencadis_server.errors import ApiError
from trencadis_server.generation.sampling import http_field, sampling_params
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


def test_values_that_contradict_each_other_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        params(tokenizer, min_tokens=20)


@pytest.mark.parametrize(
    ("name", "field"),
    [("stop_token_ids", "stop_token_ids"), ("bad_words_ids", "bad_words"), ("structured", "guided_regex")],
)
def test_a_parameter_is_called_as_the_client_calls_it(name: str, field: str) -> None:
    assert http_field(GenerationRequest.model_validate({"model": "m", "guided_regex": "a"}), name) == field
