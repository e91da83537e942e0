from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.completions import CompletionRequest

BODIES: list[Any] = [
    (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (CompletionRequest, {"model": "m", "prompt": "x"}),
]


@pytest.mark.parametrize(("model", "body"), BODIES)
@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("response_format", {"type": "text"}, "json"),
        ("structured_outputs", {"regex": "a"}, ["a"]),
        ("guided_json", {"type": "object"}, 5),
        ("guided_json", '{"type": "object"}', ""),
        ("guided_regex", "a", ""),
        ("guided_regex", "a", "a" * 70_000),
        ("guided_choice", ["a"], []),
        ("guided_choice", ["a", ""], [1]),
        ("guided_choice", ["a"], ["a"] * 1025),
        ("guided_grammar", 'start: "a"', {}),
    ],
)
def test_fields_have_the_types_that_their_apis_say(model: Any, body: Any, field: str, right: Any, wrong: Any) -> None:
    assert getattr(model.model_validate({**body, field: right}), field) == right
    assert getattr(model.model_validate({**body, field: None}), field) is None
    with pytest.raises(ValidationError):
        model.model_validate({**body, field: wrong})


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_the_document_says_what_is_in_the_objects(model: Any, body: Any) -> None:
    properties = model.model_json_schema()["properties"]
    formats = properties["response_format"]["anyOf"][0]["properties"]
    assert formats["type"] == {"enum": ["text", "json_object", "json_schema"]}
    assert set(properties["structured_outputs"]["anyOf"][0]["properties"]) == {
        "json",
        "json_object",
        "regex",
        "choice",
        "grammar",
    }
