"""What all requests share: strict JSON types, no unknown field, and types that occur in several of them."""

from __future__ import annotations

from collections.abc import Iterator
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
from trencadis.records.plain import plain_fault
from trencadis.server.errors import ApiError
from trencadis.server.protocol.fields import other_fields

__all__ = ["BiasKey", "EndpointRequest", "RequestModel", "TokenId", "TokenIds", "said_as"]

_MAX_INT = 2**31 - 1
_MAX_QUOTED = 80
_MAX_PLACE = 200
_MAX_ENTRIES = 16384
"""Longest list of anything but token ids: to look at a million texts or messages would keep every other client waiting."""

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # as many errors as there are ids would help nobody


def said_as(what: str) -> WrapValidator:
    """Return a validator that says in one sentence what a field of several types must be. Pure.

    Args:
        what: Such as ``text or token ids``.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            # An error of each type in the union would tell the client about types it never thought of.
            raise PydanticCustomError("no_such_type", "must be {what}", {"what": what}) from None

    return WrapValidator(check)


BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$"), said_as("a token id, at most nine digits")]


class RequestModel(BaseModel):
    """A JSON object from a client. ``5`` is no text, ``"5"`` no number, and NaN is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class EndpointRequest(RequestModel):
    """The whole body of a request.

    Fields that are documented but have no effect (:mod:`trencadis.server.protocol.fields`) are taken out before validation.
    """

    endpoint: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema with the fields that have no effect, since they are accepted, too. Pure."""
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
        _refuse_unknown(cls, kept, "", known=others)
        _refuse_unreadable(kept)
        return kept


def _refuse_long(data: dict[str, Any]) -> None:
    """Refuse a list or an object that nobody needs so long; token ids, and a bias for each, may be many.

    Raises:
        ApiError: There is one; the message names the field.
    """
    for name, value in data.items():
        if not isinstance(value, list | dict) or len(value) <= _MAX_ENTRIES:
            continue
        if name != "logit_bias" if isinstance(value, dict) else not isinstance(value[0], int):
            shown = ascii(name[:_MAX_QUOTED])[1:-1]
            raise ApiError(400, f"{shown} has {len(value)} entries; it takes at most {_MAX_ENTRIES}.", param=shown)


def _refuse_unknown(model: type[BaseModel], data: dict[str, Any], path: str, known: dict[str, Any]) -> None:
    """Refuse the first field that no class has, also in objects inside.

    Raises:
        ApiError: There is one; the message has the closest name that exists.
    """
    for name, value in data.items():
        field = model.model_fields.get(name)
        if field is None:
            shown = ascii(name[:_MAX_QUOTED])[1:-1]
            hint = did_you_mean(name[:_MAX_QUOTED], [*model.model_fields, *known])
            where = f" in {path[:-1]}" if path else ""
            raise ApiError(
                400, f'unknown field "{shown}"{where}.{hint}', param=f"{path}{shown}", code="unknown_parameter"
            )
        for inner in _models_in(field.annotation):
            _refuse_unknown_inside(inner, value, f"{path}{name}")


def _refuse_unknown_inside(model: type[RequestModel], value: Any, path: str) -> None:
    if isinstance(value, dict):
        _refuse_unknown(model, value, f"{path}.", known={})
    elif isinstance(value, list):
        for index, one in enumerate(value):
            if isinstance(one, dict):
                _refuse_unknown(model, one, f"{path}[{index}].", known={})


def _refuse_unreadable(data: dict[str, Any]) -> None:
    """Refuse text that no UTF-8 can hold, since JSON can write half a surrogate pair, numbers beyond 64 bits, and deep nesting.

    Raises:
        ApiError: There is some; the message names the place.
    """
    for name, value in data.items():
        fault = plain_fault(value) if isinstance(value, str | list | dict) else None
        if fault is not None:
            where, why = fault
            place = name if "nested" in why else f"{name}{where[:_MAX_PLACE]}"
            raise ApiError(400, f"{place} {why}.", param=place)


def _models_in(annotation: Any) -> Iterator[type[RequestModel]]:
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
