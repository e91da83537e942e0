"""Structured-output constraint of a request, from the fields of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trencadis.errors import InvalidRequestError, did_you_mean
from trencadis.records import StructuredOutput
from trencadis_server.errors import ApiError

if TYPE_CHECKING:
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["structured_field", "structured_of"]

_Maker = Callable[[], StructuredOutput]
_MAX_QUOTED = 80

_FORMAT_KEYS = ("name", "description", "schema", "strict")
_OPTIONS = {"disable_fallback": "there is one library", "disable_additional_properties": "say so in the schema"}
"""Keys of vLLM's object that may only be false, with the reason."""


def structured_of(body: GenerationRequest) -> StructuredOutput | None:
    """Return the structured-output constraint of a request, or None. Pure.

    Raises:
        ApiError: Two fields set a constraint, or a field has an invalid value.
    """
    asked = _asked(body)
    if len(asked) > 1:
        (first, _), (second, _) = asked[:2]
        raise ApiError(
            400, f"{first} and {second} both say what the text must be. Leave one of them out.", param=second
        )
    for name, make in asked:
        try:
            return make()
        except InvalidRequestError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from error
    return None


def structured_field(body: GenerationRequest) -> str:
    """Return the field with the constraint, such as ``guided_regex``, or an empty string. Pure.

    Raises:
        ApiError: A field has an invalid value; not raised for a request that :func:`structured_of` accepted.
    """
    return next((name for name, _ in _asked(body)), "")


def _asked(body: GenerationRequest) -> list[tuple[str, _Maker]]:
    return [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs), *_guided(body)]


def _guided(body: GenerationRequest) -> Iterator[tuple[str, _Maker]]:
    makers: dict[str, Callable[[Any], StructuredOutput]] = {
        "guided_json": StructuredOutput.json_schema,
        "guided_regex": StructuredOutput.regex,
        "guided_choice": StructuredOutput.choice,
        "guided_grammar": StructuredOutput.grammar,
    }
    for name, make in makers.items():
        value = getattr(body, name)
        if value is not None:
            yield name, lambda make=make, value=value: make(value)  # type: ignore[misc]


def _response_format(given: dict[str, Any] | None) -> Iterator[tuple[str, _Maker]]:
    if given is None:
        return
    kind = given.get("type")
    wanted = given.get("json_schema")
    _refuse_other_keys("response_format", given, ("type", "json_schema"))
    if wanted is not None and kind != "json_schema":
        raise _wrong("response_format.json_schema", 'goes with the type "json_schema" alone')
    if kind == "json_object":
        yield "response_format", StructuredOutput.json_object
    elif kind == "json_schema":
        schema = _schema_of(wanted)
        yield "response_format", lambda: StructuredOutput.json_schema(schema)
    elif kind != "text":
        raise _wrong("response_format.type", 'must be "text", "json_object" or "json_schema"')


def _schema_of(wanted: Any) -> dict[str, Any]:
    """Return the schema in OpenAI's ``json_schema``, which is enforced whether or not ``strict`` is true. Pure."""
    where = "response_format.json_schema"
    if not isinstance(wanted, dict):
        raise _wrong(where, 'must be {"name": ..., "schema": ...}')
    _refuse_other_keys(where, wanted, _FORMAT_KEYS)
    if not isinstance(wanted.get("name"), str):
        raise _wrong(f"{where}.name", "must be a string")
    if not isinstance(wanted.get("description"), str | None):
        raise _wrong(f"{where}.description", "must be a string")
    if not isinstance(wanted.get("strict"), bool | None):
        raise _wrong(f"{where}.strict", "must be true or false")
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise _wrong(f"{where}.schema", "must be a JSON schema")
    return schema


def _structured_outputs(given: dict[str, Any] | None) -> Iterator[tuple[str, _Maker]]:
    makers: dict[str, tuple[Callable[[Any], bool], str, Callable[[Any], StructuredOutput]]] = {
        "json": (_is_schema, "must be a JSON schema, as an object or as its text", StructuredOutput.json_schema),
        "json_object": (_is_flag, "must be true or false", lambda _: StructuredOutput.json_object()),
        "regex": (_is_text, "must be a string", StructuredOutput.regex),
        "choice": (_are_texts, "must be a list of strings", StructuredOutput.choice),
        "grammar": (_is_text, "must be a string", StructuredOutput.grammar),
    }
    given = {name: value for name, value in (given or {}).items() if value is not None}
    _refuse_other_keys("structured_outputs", given, (*makers, *_OPTIONS))
    for name, why in _OPTIONS.items():
        if given.get(name, False) is not False:
            raise _wrong(f"structured_outputs.{name}", f"may be false only: {why}")
    for name, (is_right, words, make) in makers.items():
        value = given.get(name)
        if value is None:
            continue
        where = f"structured_outputs.{name}"
        if not is_right(value):
            raise _wrong(where, words)
        if value is not False:
            yield where, lambda make=make, value=value: make(value)  # type: ignore[misc]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, str | dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _refuse_other_keys(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            shown = ascii(name[:_MAX_QUOTED])[1:-1]
            raise ApiError(
                400,
                f'unknown field "{shown}" in {where}.{did_you_mean(name[:_MAX_QUOTED], known)}',
                param=f"{where}.{shown}",
                code="unknown_parameter",
            )


def _wrong(where: str, must: str) -> ApiError:
    return ApiError(400, f"{where} {must}.", param=where)
