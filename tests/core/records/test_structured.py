from __future__ import annotations

import json
from typing import Any

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams, StructuredOutput
from trencadis.records.structured import MAX_STRUCTURE_CHARACTERS


def test_a_schema_is_kept_as_its_text() -> None:
    schema = {"type": "string", "maxLength": 3}
    assert json.loads(StructuredOutput.json_schema(schema).text) == schema
    assert StructuredOutput.json_schema(json.dumps(schema)) == StructuredOutput.json_schema(schema)


def test_one_choice_need_not_be_a_list() -> None:
    assert StructuredOutput.choice("yes").choices == ("yes",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "regx", "text": "a"}, 'did you mean "regex"'),
        ({"kind": "regex"}, "regex needs a text"),
        ({"kind": "json_object", "text": "{}"}, "json_object takes no text"),
        ({"kind": "choice"}, "at least one text"),
        ({"kind": "regex", "text": "a", "choices": ("b",)}, "takes no choices"),
        ({"kind": "choice", "choices": (1,)}, "must be strings"),
        ({"kind": "json_schema", "text": "{"}, "json_schema is no JSON"),
        ({"kind": "json_schema", "text": "[1]"}, r"json_schema = \[1\] must be an object"),
        ({"kind": "regex", "text": "a" * (MAX_STRUCTURE_CHARACTERS + 1)}, "65537 characters; the most are 65536"),
        ({"kind": "choice", "choices": ("a" * MAX_STRUCTURE_CHARACTERS, "b")}, "65537 characters"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        StructuredOutput(**given)


def test_parameters_take_the_record_or_its_fields_and_nothing_else() -> None:
    wanted = StructuredOutput.regex("a")
    assert SamplingParams(structured={"kind": "regex", "text": "a"}) == SamplingParams(structured=wanted)
    with pytest.raises(InvalidRequestError, match="sampling parameter structured = 'a'"):
        SamplingParams(structured="a")
