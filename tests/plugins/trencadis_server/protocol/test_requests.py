from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trencadis.records import SamplingParams
from trencadis_server.protocol.completions import MAX_PROMPTS, CompletionRequest
from trencadis_server.protocol.generation import GenerationRequest


def test_one_stop_string_and_several_are_read_alike() -> None:
    assert GenerationRequest(model="m").stops == ()
    assert GenerationRequest(model="m", stop="a").stops == ("a",)
    assert GenerationRequest(model="m", stop=["a", "b"]).stops == ("a", "b")


def test_whatever_the_ranges_allow_sampling_allows_too() -> None:
    schema = GenerationRequest.model_json_schema()["properties"]
    for name in ("n", "temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        (range_,) = [one for one in schema[name]["anyOf"] if one["type"] != "null"]
        for bound in ("minimum", "maximum"):
            SamplingParams(**{name: range_[bound]})


@pytest.mark.parametrize("prompt", ["x", "", ["x", ""], [1, 2], [[1], [2, 3]], ["x"] * MAX_PROMPTS])
def test_each_form_of_a_prompt_stays_as_it_is(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stop", "x" * 1025), ("stop", ["x" * 1025]), ("bad_words", ["x"] * 1001), ("bad_words", ["x" * 257])),
        *(("user", "x" * 1025), ("cache_salt", "x" * 1025), ("guided_regex", "a" * 70_000)),
        *(("guided_choice", ["a"] * 1025), ("prompt", ["x"] * (MAX_PROMPTS + 1))),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.representatives(9)
def test_what_costs_time_by_its_length_is_bounded(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", field: value})
