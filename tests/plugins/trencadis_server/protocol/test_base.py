from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from trencadis_server.errors import ApiError
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.completions import CompletionRequest
from trencadis_server.protocol.fields import other_fields
from trencadis_server.protocol.json_body import read_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temprature": 1}, "temprature", 'Did you mean "temperature"?'),
        ({"metdata": 1}, "metdata", 'Did you mean "metadata"?'),
        ({"zzz": 1}, "zzz", 'unknown field "zzz".'),
        ({"messages": [{"rol": "user"}]}, "messages[0].rol", 'in messages[0]. Did you mean "role"?'),
        ({"stream_options": {"include_usages": 1}}, "stream_options.include_usages", "include_usage"),
        ({"\ud800": 1}, r"\ud800", "unknown field"),
        ({"z" * 10_000: 1}, "z" * 80, "unknown field"),
    ],
)
def test_an_unknown_field_is_named_with_its_place_and_the_closest_there_is(body: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatRequest.model_validate({**CHAT, **body})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message
    caught.value.message.encode()


@pytest.mark.parametrize(
    "body",
    [
        {"n": "2"},
        {"n": 2.0},
        {"n": True},
        {"temperature": "0.5"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"stream": 1},
        {"user": 5},
        {"seed": 2**63},
        {"top_k": 2**40},
        {"messages": []},
    ],
)
def test_json_types_and_ranges_are_taken_at_their_word(body: Any) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({**CHAT, **body})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "ab\ud800"}]}, "messages[0].content"),
        ({"stop": ["a", "\udfff"]}, "stop[1]"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"chat_template_kwargs": {"a": {"b": "\ud800"}}}, "chat_template_kwargs.a.b"),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
    ],
)
def test_half_a_character_is_refused_wherever_it_is(body: Any, param: str) -> None:
    with pytest.raises(ApiError, match="half a surrogate pair") as caught:
        read_body(json.dumps({**CHAT, **body}).encode(), ChatRequest)
    assert caught.value.param == param


@pytest.mark.parametrize("levels", [17, 490, 50_000])
@pytest.mark.parametrize("name", ["chat_template_kwargs", "messages", "logit_bias"])
def test_deep_nesting_is_refused_before_anything_recurses_into_it(name: str, levels: int) -> None:
    value = '{"a":[' * levels + "1" + "]}" * levels
    inner = f'[{{"role": "user", "tool_calls": [{value}]}}]' if name == "messages" else value
    with pytest.raises(ApiError, match="nested more than 32 levels deep") as caught:
        read_body(f'{{"model": "m", "{name}": {inner}}}'.encode(), ChatRequest)
    assert caught.value.param == name


def test_null_is_the_default_of_every_field_that_has_one() -> None:
    optional = {name: None for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    assert ChatRequest.model_validate({**optional, **CHAT}) == ChatRequest.model_validate(CHAT)


def test_a_field_of_several_types_has_one_error_in_words() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", "prompt": {"a": 1}})
    (error,) = caught.value.errors()
    assert (error["loc"], error["msg"].split(",")[0]) == (("prompt",), "must be text")


def test_the_schema_has_every_field_that_is_accepted() -> None:
    schema = ChatRequest.model_json_schema()
    assert set(schema["properties"]) == {*ChatRequest.model_fields, *other_fields("chat")}
    assert schema["properties"]["store"]["enum"] == [None, False]
    assert "enum" not in schema["properties"]["metadata"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("name", ["messages", "stop", "zzz"])
def test_a_list_that_nobody_needs_so_long_is_refused_before_it_is_looked_at(name: str) -> None:
    with pytest.raises(ApiError, match=f"{name} has 16385 entries; it takes at most 16384"):
        ChatRequest.model_validate({**CHAT, name: [object()] * 16385})


def test_places_of_values_are_put_into_words_for_an_error_only() -> None:
    long = {"A" * 1_000_000: [""] * 200_000}
    begin_s = time.process_time()
    with pytest.raises(ValidationError, match="must be shorter than 65536"):
        ChatRequest.model_validate({**CHAT, "kv_transfer_params": long})
    assert time.process_time() - begin_s < 5  # the words alone would be 200 GB
