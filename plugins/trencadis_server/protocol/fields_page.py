"""Reference page of the API's fields, made from the request models and the table of fields without an effect."""

from __future__ import annotations

import inspect
import json

from trencadis_server.protocol.base import EndpointRequest
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.completions import CompletionRequest
from trencadis_server.protocol.embeddings import EmbeddingsRequest
from trencadis_server.protocol.fields import OtherField, other_fields
from trencadis_server.protocol.tokenization import DetokenizeRequest, TokenizeRequest

__all__ = ["ENDPOINTS", "fields_page"]

ENDPOINTS: dict[str, type[EndpointRequest]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/embeddings": EmbeddingsRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
"""Routes with a body, and its class."""

_HEAD = """# Fields of the API

A field is *honoured*, *ignored* (accepted without an effect), or *refused* unless its value asks for nothing.
Any other field is an error with status 400 that suggests the closest name.
A field that is null has its default.
"""


def fields_page() -> str:
    """Return the page in Markdown. Pure."""
    return "\n".join([_HEAD, *(_section(route, model) for route, model in ENDPOINTS.items())])


def _section(route: str, model: type[EndpointRequest]) -> str:
    rows = [f"## {route}", "", f"{inspect.getdoc(model)}", "", "| field | treatment | note |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        treatment = "required" if field.is_required() else "honoured"
        note = field.description or ""
        if note.startswith("Ignored"):
            treatment, note = "ignored", note.removeprefix("Ignored:").strip()
        rows.append(f"| `{name}` | {treatment} | {note} |")
    rows += [_other_row(field) for field in other_fields(model.endpoint).values()]
    return "\n".join([*rows, ""])


def _other_row(field: OtherField) -> str:
    why = field.why[0].upper() + field.why[1:] + "."
    if field.accepted is None:
        return f"| `{field.name}` | ignored | {why} |"
    harmless = [f"`{json.dumps(value)}`" for value in field.accepted] or ["null"]
    if field.moot_if is not None:
        harmless.append(f"with `{field.moot_if[0]}` = `{json.dumps(field.moot_if[1])}`")
    return f"| `{field.name}` | refused unless {' or '.join(harmless)} | {why} |"
