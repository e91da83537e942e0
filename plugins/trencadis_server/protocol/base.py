"""Base of all request models: strict JSON types, no unknown fields, and common types."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from trencadis.errors import did_you_mean
from trencadis_server.errors import ApiError
from trencadis_server.protocol.fields import other_fields

__all__ = ["EndpointRequest", "LogitBias", "RequestModel", "TokenId", "TokenIds", "said_as"]

_MAX_INT = 2**31 - 1
_MAX_QUOTED = 80
_MAX_DIGITS = 9
_MAX_BIAS = 100.0
_MAX_ENTRIES = 16384
"""Longest list of anything except token ids, and largest object: validating a million texts or messages would keep
every other client waiting."""

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # as many errors as there are ids would help no client


def said_as(what: str) -> WrapValidator:
    """Return a validator whose message describes, in one sentence, a field of several types. Pure.

    Args:
        what: Description of the types, such as ``text or token ids``.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            # Errors of each type in the union would tell the client about types that it did not mean.
            raise PydanticCustomError("no_such_type", "must be {what}", {"what": what}) from None

    return WrapValidator(check)


def _stop_at_the_first(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Refuse a bias at the first invalid key: pydantic would report an error for every key."""
    if isinstance(value, dict):
        for key in value:
            if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS):
                raise PydanticCustomError(
                    "no_token_id",
                    "has the key {key}; each must be a token id, at most nine digits",
                    {"key": ascii(key)[:_MAX_QUOTED]},
                )
        wrong = next((key for key, bias in value.items() if not _is_bias(bias)), None)
        if wrong is not None:
            raise PydanticCustomError(
                "no_bias", "must be a number from -100 to 100 for each token id; that of {key} is none", {"key": wrong}
            )
    return handler(value)


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_BIAS <= value <= _MAX_BIAS


_Key = Annotated[str, StringConstraints(pattern=rf"^[0-9]{{1,{_MAX_DIGITS}}}$")]
LogitBias = Annotated[
    dict[_Key, Annotated[float, Field(ge=-_MAX_BIAS, le=_MAX_BIAS)]], WrapValidator(_stop_at_the_first)
]
"""Numbers by token id."""


class RequestModel(BaseModel):
    """A JSON object from a client. ``5`` is no text, ``"5"`` no number, and NaN is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class EndpointRequest(RequestModel):
    """The whole body of a request.

    Fields that are documented but have no effect (:mod:`trencadis_server.protocol.fields`) are taken out before validation.
    """

    endpoint: ClassVar[str] = ""

    model: str | None = Field(None, description="A name that /v1/models lists; left out or empty: the model served.")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema including the fields without an effect, since these are accepted. Pure."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in other_fields(cls.endpoint).items():
            described: dict[str, Any] = {"description": f"No effect: {field.why}."}
            if field.accepted is not None and field.moot_if is None:
                described["enum"] = [None, *field.accepted]
            schema["properties"][name] = described
        return schema

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        others = other_fields(cls.endpoint)
        for name, field in others.items():
            if name in data and not field.accepts(data[name], data):
                raise ApiError(
                    400,
                    f"{name} is not supported: {field.why}. Leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        kept = {name: value for name, value in data.items() if name not in others}
        _refuse_long(kept)
        _refuse_unknown(cls, kept, known=others)
        return kept


def _refuse_long(data: dict[str, Any]) -> None:
    """Refuse a list or an object that is too long.

    Raises:
        ApiError: A list or an object is too long; the message names the field.
    """
    for name, value in data.items():
        is_long = isinstance(value, list | dict) and len(value) > _MAX_ENTRIES
        if is_long and not (isinstance(value, list) and isinstance(value[0], int)):
            shown = ascii(name[:_MAX_QUOTED])[1:-1]
            raise ApiError(400, f"{shown} has {len(value)} entries; it takes at most {_MAX_ENTRIES}.", param=shown)


def _refuse_unknown(model: type[BaseModel], data: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuse the first unknown field, also in nested objects.

    Raises:
        ApiError: A field is unknown; the message has the closest name that exists.
    """
    found = _unknown_in(model, data)
    if found is None:
        return
    steps, name, fields = found
    place = "".join(reversed(steps)).removeprefix(".")
    shown = ascii(name[:_MAX_QUOTED])[1:-1]
    hint = did_you_mean(name[:_MAX_QUOTED], [*fields, *(() if steps else known)])
    raise ApiError(
        400,
        f'unknown field "{shown}"{f" in {place}" if place else ""}.{hint}',
        param=f"{place}.{shown}" if place else shown,
        code="unknown_parameter",
    )


def _unknown_in(model: type[BaseModel], data: dict[str, Any]) -> tuple[list[str], str, Collection[str]] | None:
    """Return the path to an object with an unknown field, innermost first, the field's name and the valid names; or None."""
    fields = _fields_of(model)
    for name, value in data.items():
        if name not in fields:
            return [], name, fields
        for inner in fields[name]:
            objects = enumerate(value) if isinstance(value, list) else [(-1, value)]
            for index, one in objects:
                found = _unknown_in(inner, one) if isinstance(one, dict) else None
                if found is not None:
                    found[0].append(f".{name}" if index < 0 else f".{name}[{index}]")
                    return found
    return None


@functools.cache
def _fields_of(model: type[BaseModel]) -> dict[str, tuple[type[RequestModel], ...]]:
    """Return a class's fields and the classes of their nested objects. Pure."""
    return {name: tuple(_models_in(field.annotation)) for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[RequestModel]]:
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
