"""Flags of the sampling parameters, derived from the fields of ``SamplingParams``: a new field is a new flag."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trencadis.cli.structured_flags import add_structured_flags, structured_of
from trencadis.errors import InvalidRequestError
from trencadis.files import parse_json
from trencadis.records import SamplingParams, parameter_help

__all__ = [
    "add_sampling_flags",
    "default_of",
    "parameter_from_text",
    "parameter_names",
    "sampling_params_of",
    "show_parameter",
]

_LEFT_OUT = object()
_TABLES = frozenset({"logit_bias", "logits_processors"})
_FIELDS = tuple(field for field in attrs.fields(SamplingParams) if field.name != "structured")


def add_sampling_flags(parser: argparse.ArgumentParser, *, defaults: Mapping[str, Any]) -> None:
    """Add one flag for each sampling parameter, and those that say what the text must be.

    Fields that hold several values become flags that may be repeated.

    Args:
        parser: Gets the flags.
        defaults: Defaults of the command, where they differ from the fields' own.
    """
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    helps = parameter_help()
    for field in _FIELDS:
        default = defaults.get(field.name, _default_of(field))
        text = helps.get(field.name, "").replace("%", "%%")
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=_LEFT_OUT,
            help=f"{text} (default: {_show(default)})",
            **_argument(hints[field.name]),
        )
    add_structured_flags(parser)


def sampling_params_of(args: argparse.Namespace, *, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return what the flags say; ``defaults`` and then the fields' own where they say nothing. Pure.

    Raises:
        InvalidRequestError: A value is out of range, or a file cannot be read.
    """
    given = {field.name: getattr(args, field.name) for field in _FIELDS}
    given = {name: value for name, value in given.items() if value is not _LEFT_OUT}
    for name in _TABLES & set(given):
        given[name] = dict(given[name])
    return SamplingParams(**{**defaults, **given, "structured": structured_of(args)})


def parameter_names() -> list[str]:
    """Return the sampling parameters that have a flag of their own, in order. Pure."""
    return [field.name for field in _FIELDS]


def parameter_from_text(name: str, text: str) -> Any:
    """Return what a text means as the value of a sampling parameter; of those that hold several values, it is one. Pure.

    Args:
        name: One of :func:`parameter_names`.
        text: Such as ``0.7`` or ``none``.

    Raises:
        InvalidRequestError: The text is no value of the parameter's type.
    """
    argument = _argument(typing.get_type_hints(SamplingParams)[name])
    read = argument.get("type", _truth)
    try:
        value = read(text)
    except ValueError:
        kind = getattr(read, "__name__", "value").strip("_")
        raise InvalidRequestError(
            f"sampling parameter {name} = {text!r} is impossible: it must be {_in_words(kind)}."
        ) from None
    if argument.get("action") is not _Collect:
        return value
    return dict([value]) if name in _TABLES else (value,)


def default_of(name: str) -> Any:
    """Return the default of a sampling parameter. Pure."""
    return _default_of(getattr(attrs.fields(SamplingParams), name))


def show_parameter(value: Any) -> str:
    """Return the value of a sampling parameter as a person writes it. Pure."""
    return _show(value)


def _truth(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError(text)
    return text.lower() == "true"


def _in_words(kind: str) -> str:
    words = {"int": "a whole number", "float": "a number", "truth": "true or false"}
    plain, _, rest = kind.partition(" or ")
    shown = words.get(plain, f"like {plain}")
    return f"{shown} or {rest}" if rest else shown


def _argument(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type. Pure."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {types.UnionType, typing.Union}:
        plain = next(member for member in inner if member is not type(None))
        if typing.get_origin(plain) is None:
            return {"type": _or_none(plain), "metavar": _metavar(plain)}
        return _argument(plain)
    if origin is tuple and typing.get_origin(inner[0]) is tuple:
        return {"action": _Collect, "type": _token_ids, "metavar": "N,N..."}
    if origin is tuple:
        return {"action": _Collect, "type": inner[0], "metavar": _metavar(inner[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping) and inner[0] is str:
        return {"action": _Collect, "type": _named, "metavar": "NAME=JSON"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"action": _Collect, "type": _pair, "metavar": "TOKEN=BIAS"}
    return {"type": hint, "metavar": _metavar(hint)}


class _Collect(argparse.Action):
    """Collects the values of a repeated flag; the first one replaces the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is _LEFT_OUT else before), values])


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        return None if text.lower() == "none" else read(text)

    read_or_none.__name__ = f"{getattr(read, '__name__', 'value')} or none"
    return read_or_none


def _pair(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(","))


def _named(text: str) -> tuple[str, dict[str, Any]]:
    name, _, arguments = text.partition("=")
    return name, dict(parse_json(arguments or "{}"))


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "VALUE")


def _default_of(field: attrs.Attribute[Any]) -> Any:
    factory = getattr(field.default, "factory", None)
    return field.default if factory is None else factory()


def _show(value: Any) -> str:
    return (
        "none" if value is None or value in ((), {}) else str(value).lower() if isinstance(value, bool) else str(value)
    )
