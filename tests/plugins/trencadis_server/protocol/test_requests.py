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


@pytest.mark.parametrize(
    "field",
    [
        {"stop": "x" * 1025},
        {"stop": ["x" * 1025]},
        {"bad_words": ["x"] * 1001},
        {"bad_words": ["x" * 257]},
        {"user": "x" * 1025},
        {"cache_salt": "x" * 1025},
    ],
)
def test_what_costs_time_by_its_length_is_bounded(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerationRequest(model="m", **field)


@pytest.mark.parametrize("prompt", ["x", "", ["x", ""], [1, 2], [[1], [2, 3]], ["x"] * MAX_PROMPTS])
def test_each_form_of_a_prompt_stays_as_it_is(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "x"], [-1], [2**31], [1.0], [True], 5, None, ["x"] * (MAX_PROMPTS + 1)]
)
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"model": "m", "prompt": prompt})
