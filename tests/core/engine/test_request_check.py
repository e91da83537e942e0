from __future__ import annotations

from typing import Any

import pytest

from trencadis.engine.request_check import check_request
from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import Request, SamplingParams


def check(prompt: tuple[int, ...], **params: Any) -> None:
    request = Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(**params))
    check_request(request, vocab_size=10, max_model_len=4)


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
