"""JSON schemas of answers for the OpenAPI document, inlined, so that routes need no registry of components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trencadis_server.protocol.answers import ErrorAnswer

__all__ = ["documented", "schema_of"]

_ERRORS: Mapping[int | str, str] = {
    "4XX": "The request is at fault, or too much is asked at once (429).",
    "5XX": "The engine or the server failed; 503: ask again later.",
}


def schema_of(type_: Any) -> dict[str, Any]:
    """Return the JSON schema of a msgspec type, without references. Pure; the type must not contain itself."""
    (schema,), components = msgspec.json.schema_components([type_], ref_template="{name}")
    resolved = _resolved(schema, components)
    if not isinstance(resolved, dict):
        raise TypeError(f"{type_!r} has no schema of its own")
    return resolved


def documented(answer: Any, *, stream: Any = None) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route. Pure.

    Args:
        answer: msgspec type of the answer with status 200.
        stream: msgspec type of an event, if the answer may be a stream of events instead; None: never.
    """
    content: dict[str, Any] = {"application/json": {"schema": schema_of(answer)}}
    if stream is not None:
        # Before OpenAPI 3.2 a stream's schema is that of each event.
        event = {"anyOf": [schema_of(stream), schema_of(ErrorAnswer)]}
        chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
        data = {"anyOf": [{"const": "[DONE]"}, chunk]}
        content["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
        }
    error = {"application/json": {"schema": schema_of(ErrorAnswer)}}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    return answers | {status: {"description": text, "content": error} for status, text in _ERRORS.items()}


def _resolved(schema: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_resolved(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(components[schema["$ref"]], components)
    return {name: _resolved(value, components) for name, value in schema.items()}
