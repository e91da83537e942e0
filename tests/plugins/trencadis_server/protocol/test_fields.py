from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from trencadis_server.errors import ApiError
from trencadis_server.protocol.chat import ChatMessage, ChatRequest
from trencadis_server.protocol.completions import CompletionRequest
from trencadis_server.protocol.embeddings import EmbeddingsRequest
from trencadis_server.protocol.fields import OTHER_FIELDS, other_fields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BODIES = {
    "chat": (ChatRequest, CHAT),
    "completions": (CompletionRequest, {"model": "m", "prompt": "x"}),
    "embeddings": (EmbeddingsRequest, {"model": "m", "input": "x"}),
}


@pytest.mark.parametrize(
    ("endpoint", "module", "name"),
    [
        ("chat", "chat.completion_create_params", "CompletionCreateParamsBase"),
        ("completions", "completion_create_params", "CompletionCreateParamsBase"),
        ("embeddings", "embedding_create_params", "EmbeddingCreateParams"),
    ],
)
def test_every_field_that_the_official_client_sends_is_treated(endpoint: str, module: str, name: str) -> None:
    import importlib

    official = getattr(importlib.import_module(f"openai.types.{module}"), name)
    treated = set(BODIES[endpoint][0].model_fields) | set(other_fields(endpoint))
    assert set(get_type_hints(official)) - treated == set()


def test_every_field_of_a_message_is_known() -> None:
    from openai.types.chat import chat_completion_assistant_message_param, chat_completion_tool_message_param

    modules = (chat_completion_assistant_message_param, chat_completion_tool_message_param)
    params: list[Any] = [
        modules[0].ChatCompletionAssistantMessageParam,
        modules[1].ChatCompletionToolMessageParam,
    ]
    for param in params:
        assert set(get_type_hints(param)) - set(ChatMessage.model_fields) == set()


@pytest.mark.parametrize("field", OTHER_FIELDS, ids=lambda field: field.name)
def test_a_field_without_an_effect_is_dropped_or_refused_as_the_table_says(field: Any) -> None:
    for endpoint in field.endpoints:
        model, body = BODIES[endpoint]
        plain = model.model_validate(body)
        assert field.name not in model.model_fields
        for value in [None, *(field.accepted if field.accepted is not None else ["anything", {"a": 1}])]:
            assert model.model_validate({**body, field.name: value}) == plain
        if field.accepted is not None:
            with pytest.raises(ApiError, match=f"{field.name} is not supported: ") as caught:
                model.model_validate({**body, field.name: "something else"})
            assert caught.value.param == field.name
    json.dumps(field.accepted)


def test_no_field_is_in_the_table_twice() -> None:
    names = [(field.name, endpoint) for field in OTHER_FIELDS for endpoint in field.endpoints]
    assert len(names) == len(set(names))


def test_tools_that_may_not_be_called_ask_for_nothing_and_one_is_not_true() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    ChatRequest.model_validate({**CHAT, "tools": tools, "tool_choice": "none"})
    for fields in ({"tools": tools, "tool_choice": "auto"}, {"store": 0}):
        with pytest.raises(ApiError) as caught:
            ChatRequest.model_validate({**CHAT, **fields})
        assert caught.value.param == next(iter(fields))
