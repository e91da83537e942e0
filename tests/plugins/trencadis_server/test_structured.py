from __future__ import annotations

from typing import Any

import pytest

from trencadis.records import StructuredOutput
from trencadis_server.errors import ApiError
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
    ("fields", "first", "second"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
            "response_format",
            "guided_choice",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "structured_outputs.json",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}},
            "response_format",
            "structured_outputs.json_object",
        ),
    ],
)
def test_two_at_once_are_refused_and_both_named(fields: Any, first: str, second: str) -> None:
    with pytest.raises(ApiError, match=f"{first} and {second} both say") as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, second)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", '"json_schema"'),
        ({"response_format": {"type": "xml"}}, "response_format.type", '"json_schema"'),
        ({"response_format": {"type": "text", "sort": 1}}, "response_format.sort", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", '"schema"'),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema",
            "alone",
        ),
        (openai_schema(name=5), "response_format.json_schema.name", "string"),
        (openai_schema(schema=None), "response_format.json_schema.schema", "a JSON schema"),
        (openai_schema(strict="yes"), "response_format.json_schema.strict", "true or false"),
        (openai_schema(description=5), "response_format.json_schema.description", "string"),
        (openai_schema(shema={}), "response_format.json_schema.shema", 'Did you mean "schema"'),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", 'Did you mean "regex"'),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs.disable_fallback", "one library"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
    ],
)
def test_what_is_wrong_is_named(fields: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


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
