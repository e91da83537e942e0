from __future__ import annotations

from typing import Any

import pytest

from trencadis.records import StructuredOutput
from trencadis_server.generation.structured import structured_field, structured_of
from trencadis_server.protocol.completions import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> StructuredOutput | None:
    return structured_of(CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields}))


def openai_schema(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **more}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object()),
        (openai_schema(), StructuredOutput.json_schema(SCHEMA)),
        (openai_schema(strict=True, description="d"), StructuredOutput.json_schema(SCHEMA)),
        (openai_schema(strict=False), StructuredOutput.json_schema(SCHEMA)),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutput.json_schema({"type": "null"})),
        ({"structured_outputs": {"json_object": True, "regex": None}}, StructuredOutput.json_object()),
        ({"structured_outputs": {"json_object": False, "regex": "a+"}}, StructuredOutput.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": "g", "disable_fallback": False}}, StructuredOutput.grammar("g")),
        ({"guided_json": SCHEMA}, StructuredOutput.json_schema(SCHEMA)),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, StructuredOutput.regex("a+")),
        ({"guided_choice": ["a"]}, StructuredOutput.choice(["a"])),
        ({"guided_grammar": "g", "guided_decoding_backend": "xgrammar"}, StructuredOutput.grammar("g")),
    ],
)
def test_every_field_says_what_its_api_means(fields: Any, expected: StructuredOutput | None) -> None:
    assert asked(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, ""),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "g"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_the_field_is_known_by_its_name(fields: dict[str, Any], name: str) -> None:
    assert structured_field(CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})) == name
