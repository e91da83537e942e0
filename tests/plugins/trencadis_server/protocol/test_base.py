from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from trencadis_server.errors import ApiError
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.fields import other_fields
from trencadis_server.protocol.json_body import read_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


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


@pytest.mark.parametrize(("name", "param"), [("\ud800", r"\ud800"), ("z" * 10_000, "z" * 80)], ids=["half", "long"])
def test_an_unknown_field_is_named_in_text_and_not_at_length(name: str, param: str) -> None:
    with pytest.raises(ApiError, match="unknown field") as caught:
        ChatRequest.model_validate({**CHAT, name: 1})
    assert (caught.value.status, caught.value.param) == (400, param)
    caught.value.message.encode()
