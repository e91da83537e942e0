from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trencadis_server.protocol.chat import ChatMessage, ChatRequest

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "limit", "name"),
    [
        ({}, None, "max_completion_tokens"),
        ({"max_tokens": 3}, 3, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5, "max_completion_tokens"),
    ],
)
@pytest.mark.representatives(3)
def test_the_newer_name_of_the_limit_wins_and_the_limit_knows_its_name(given: Any, limit: Any, name: str) -> None:
    request = ChatRequest(model="m", messages=MESSAGES, **given)
    assert (request.most_tokens, request.most_tokens_field) == (limit, name)


def test_only_an_assistant_may_have_said_nothing() -> None:
    for role in ("developer", "system", "user", "tool"):
        assert ChatMessage.model_validate({"role": role, "content": ""}).content == ""
    for content in ({}, {"content": None}):
        assert ChatMessage.model_validate({"role": "assistant", "tool_calls": [], **content}).content is None
        with pytest.raises(ValidationError, match='the role "user" must have text'):
            ChatMessage.model_validate({"role": "user", **content})


def test_the_document_says_what_a_part_is() -> None:
    (parts,) = [
        one for one in ChatMessage.model_json_schema()["properties"]["content"]["anyOf"] if one["type"] == "array"
    ]
    assert [one["required"] for one in parts["items"]["anyOf"]] == [["type", "text"], ["type", "refusal"]]
