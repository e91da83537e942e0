from __future__ import annotations

from typing import Any

import pytest

from trencadis.engine.request_check import check_request
from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import Request, SamplingParams


def check(prompt: tuple[int, ...], **params: Any) -> None:
    request = Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(**params))
    check_request(request, vocab_size=10, max_model_len=4, eos_token_ids=(0,))


def test_what_fits_passes() -> None:
    check((0, 9, 5), stop_token_ids=[9])


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "words"),
    [
        ((), {}, InvalidRequestError, "empty prompt"),
        ((1, 2, 3, 4), {}, PromptTooLongError, "has 4 tokens; .* limit is 3 "),
        ((1, -1), {}, InvalidRequestError, "token id -1 in the prompt"),
        ((1, 10), {}, InvalidRequestError, "token id 10 in the prompt .* 0 to 9"),
        (
            (1,),
            {"logit_bias": {10: 1.0}},
            InvalidRequestError,
            "logit_bias: token id 10 is outside the vocabulary, 0 to 9",
        ),
    ],
)
def test_what_no_engine_can_run_is_refused(
    prompt: tuple[int, ...], params: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        check(prompt, **params)
    assert getattr(caught.value, "field", "") == "".join(params)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": [0], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [0, 3], "stop_token_ids": [3], "min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [0, 3], "bad_token_ids": [3], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 1}, "min_tokens"),
        ({"bad_token_ids": range(10)}, "bad_token_ids"),
        ({"bad_token_ids": range(1, 10), "allowed_token_ids": [0], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_parameters_that_leave_no_token_to_choose_are_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check((1,), **params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [0]},
        {"allowed_token_ids": [0], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [0, 3], "min_tokens": 1},
    ],
)
def test_one_token_is_choice_enough(params: dict[str, Any]) -> None:
    check((1,), **params)
