from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from trencadis_server.protocol.answers import ModelList
from trencadis_server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from trencadis_server.protocol.completions import CompletionRequest, TextCompletion
from trencadis_server.protocol.embeddings import EmbeddingList
from trencadis_server.protocol.openapi import documented, schema_of
from trencadis_server.protocol.tokenization import Tokenized


class Inner(msgspec.Struct):
    number: int


class Outer(msgspec.Struct):
    inner: list[Inner]
    name: str | None = None


def test_a_schema_has_what_it_refers_to_in_place() -> None:
    schema = schema_of(Outer)
    assert schema["properties"]["inner"]["items"]["properties"] == {"number": {"type": "integer"}}
    assert schema["required"] == ["inner"]


@pytest.mark.parametrize("answer", [ChatCompletion, ChatChunk, TextCompletion, EmbeddingList, ModelList, Tokenized])
def test_no_answer_has_a_reference_in_its_schema(answer: Any) -> None:
    assert "$ref" not in json.dumps(schema_of(answer))


def test_a_route_documents_its_answer_its_stream_and_its_errors() -> None:
    answers = documented(Outer, stream=Inner)
    assert set(answers) == {200, "4XX", "5XX"}
    assert set(answers[200]["content"]) == {"application/json", "text/event-stream"}
    event = answers[200]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    assert event["anyOf"][0] == {"const": "[DONE]"}
    assert schema_of(Inner) in event["anyOf"][1]["contentSchema"]["anyOf"]
    assert set(documented(Outer)[200]["content"]) == {"application/json"}


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_the_document_says_what_is_in_the_objects_of_structured_outputs(model: Any) -> None:
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
