"""Types of the structured-output fields of OpenAI, vLLM and older versions of vLLM.

They are objects with keys such as ``json`` and ``schema``, which a request class cannot have as names of fields;
:mod:`trencadis_server.generation.structured` checks their content.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, WithJsonSchema

from trencadis.records.structured import MAX_CHOICES, MAX_STRUCTURE_CHARACTERS
from trencadis_server.protocol.base import said_as

__all__ = ["Choices", "Pattern", "ResponseFormat", "Schema", "StructuredOutputs"]

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]
"""A regex or a grammar."""

Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
"""Texts to choose from."""

Schema = Annotated[dict[str, Any] | Pattern, said_as("a JSON schema, as an object or as its text")]
"""A JSON schema."""

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]}

ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "schema": {"type": "object"},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["name", "schema"],
                },
            },
            "required": ["type"],
        }
    ),
]
"""OpenAI's ``response_format``."""

StructuredOutputs = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": _SCHEMA,
                "json_object": {"type": "boolean"},
                "regex": {"type": "string", "minLength": 1},
                "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "grammar": {"type": "string", "minLength": 1},
            },
            "additionalProperties": False,
        }
    ),
]
"""vLLM's ``structured_outputs``."""
