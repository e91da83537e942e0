from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis.server.errors import ApiError
from trencadis.server.protocol.generation import GenerationRequest
from trencadis.server.sampling import sampling_params
from trencadis.text import Tokenizer


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


def test_a_banned_word_of_several_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="only single tokens can be banned"):
        params(tokenizer, bad_words=["the", "antidisestablishment"])


def test_values_that_contradict_each_other_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        params(tokenizer, min_tokens=20)
