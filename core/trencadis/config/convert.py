"""Raw values to typed ones: strict, because a config that is silently bent is worse than one that is refused.

Text from flags and the environment is first read as its setting's type says; what then arrives, like what a file or
Python gave, is checked and structured by cattrs. A whole number may stand for a float; nothing else is bent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from cattrs.strategies import configure_union_passthrough

from trencadis.config.named_tables import is_named_tables, structure_tables
from trencadis.errors import must_be_one_of

__all__ = ["WrongValueError", "describe_type", "has_classes", "is_readable", "parse_text", "structure"]

_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


class WrongValueError(ValueError):
    """A value does not fit its type; the message says what it must be. Private to config loading."""


def describe_type(kind: Any) -> str:
    """Return a type in words, such as ``a whole number`` or ``one of: auto, float32``. Pure."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _NAMES:
        return _NAMES[kind]
    if origin is Literal:
        return "one of: " + ", ".join(str(choice) for choice in arguments)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of: " + ", ".join(str(member.value) for member in kind)
    if _is_union(origin):
        return " or ".join("none" if item is type(None) else describe_type(item) for item in arguments)
    if _is_mapping(origin or kind):
        return "a table"
    if _is_collection(origin or kind):
        return f"a list of {_NAMES.get(arguments[0], 'values').removeprefix('a ')}" if arguments else "a list"
    return getattr(kind, "__name__", str(kind))


def parse_text(kind: Any, text: str) -> Any:
    """Return what a flag's or environment variable's text means for a type; text that means nothing comes back unchanged. Pure.

    Args:
        kind: The setting's type.
        text: Such as ``12``, ``true``, ``log,prometheus`` or ``["a,b", "c"]``.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str or kind is Path:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if kind in {int, float}:
        return _number(kind, text)
    if origin is Literal:
        return next((choice for choice in arguments if str(choice) == text), text)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next((member.value for member in kind if str(member.value) == text), text)
    if _is_union(origin):
        return _first_meaning(arguments, text)
    if not _is_mapping(origin or kind) and _is_collection(origin or kind):
        written = _written_list(text)
        if written is not None:
            return written
        item = arguments[0] if arguments else str
        return tuple(parse_text(item, part.strip()) for part in text.split(",") if part.strip())
    return _toml_value(text)


def structure(kind: Any, value: Any) -> Any:
    """Return ``value`` as an instance of ``kind``. Pure.

    Raises:
        WrongValueError: It is of another type; the message says what it must be.
    """
    try:
        return _converter().structure(value, kind)
    except WrongValueError:
        raise
    except Exception as error:
        raise WrongValueError(f"must be {describe_type(kind)}.") from error


def is_readable(kind: Any) -> bool:
    """Return whether :func:`structure` knows a type, with all types in it. Pure."""
    return all(_is_known(leaf) for leaf in _leaves(kind))


def has_classes(kind: Any) -> bool:
    """Return whether a type has classes with fields in it: :func:`structure` takes tables for those, no instances. Pure."""
    return any(attrs.has(leaf) or dataclasses.is_dataclass(leaf) for leaf in _leaves(kind))


def _leaves(kind: Any) -> Iterator[Any]:
    """Yield the types that unions, collections and mappings are made of, or the type itself."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if not arguments or not (_is_union(origin) or _is_collection(origin)):
        yield kind
        return
    for item in arguments:
        if item is not Ellipsis and item is not type(None):
            yield from _leaves(item)


def _is_known(kind: Any) -> bool:
    try:
        _converter().get_structure_hook(kind)
    except cattrs.StructureHandlerNotFoundError:
        return False
    return True


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False, forbid_extra_keys=True)
    configure_union_passthrough(str | int | float | bool | None, converter)
    for kind in (int, str, bool):
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook_factory(is_named_tables, lambda kind: _tables_hook(converter, kind))
    converter.register_structure_hook_factory(_is_literal, _choice_hook)
    converter.register_structure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, enum.Enum), _member)
    converter.register_structure_hook_factory(_is_generic_collection, lambda kind: _collection_hook(converter, kind))
    return converter


def _exactly(kind: type[Any]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise WrongValueError(f"must be {describe_type(kind)}.")
        return value

    return hook


def _float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValueError(f"must be {describe_type(float)}.")
    return float(value)


def _path(value: Any, _: Any) -> Path:
    if not isinstance(value, str | Path):
        raise WrongValueError(f"must be {describe_type(Path)}.")
    return Path(value)


def _choice_hook(kind: Any) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        for choice in typing.get_args(kind):
            if type(choice) is type(value) and choice == value:
                return choice
        raise WrongValueError(_not_among(value, [str(choice) for choice in typing.get_args(kind)]))

    return hook


def _member(value: Any, kind: Any) -> Any:
    for member in kind:
        if value is member or (type(value) is type(member.value) and value == member.value):
            return member
    raise WrongValueError(_not_among(value, [str(member.value) for member in kind]))


def _not_among(value: Any, choices: list[str]) -> str:
    return must_be_one_of(str(value), choices)


def _collection_hook(converter: cattrs.Converter, kind: Any) -> Callable[[Any, Any], Any]:
    """Structure element by element: cattrs alone would take the letters of a string for elements."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    maker = origin if origin in {tuple, list, set, frozenset} else tuple
    fixed = origin is tuple and Ellipsis not in arguments

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise WrongValueError(f"must be {describe_type(kind)}.")
        if fixed and len(value) != len(arguments):
            raise WrongValueError(f"must have {len(arguments)} elements.")
        kinds = arguments if fixed else (arguments[0],) * len(value)
        try:
            return maker(converter.structure(item, item_kind) for item, item_kind in zip(value, kinds, strict=True))
        except WrongValueError as error:
            raise WrongValueError(f"each element {error}") from error

    return hook


def _tables_hook(converter: cattrs.Converter, kind: Any) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        try:
            return structure_tables(kind, value, converter.structure)
        except ValueError as error:
            raise WrongValueError(str(error)) from error

    return hook


def _number(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _first_meaning(kinds: tuple[Any, ...], text: str) -> Any:
    if type(None) in kinds and text.strip().lower() == "none":
        return None
    for kind in sorted((kind for kind in kinds if kind is not type(None)), key=lambda kind: kind is str):
        value = parse_text(kind, text)
        if kind is str or value != text:
            return value
    return text


def _written_list(text: str) -> Any:
    """Return a list that is written as in JSON or TOML, in brackets; None if a text is none. Pure.

    A text that begins as such a list and is none comes back unchanged: divided at commas it would be other values than were meant.
    """
    inside = text.strip()
    if not inside.startswith("["):
        return None
    with contextlib.suppress(ValueError):
        value = json.loads(inside)
        return value if isinstance(value, list) else text
    value = _toml_value(inside)
    if isinstance(value, list):
        return value
    return text if inside[1:].lstrip()[:1] in {'"', "'", ""} else None  # an address may begin with a bracket


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType


def _is_literal(kind: Any) -> bool:
    origin: Any = typing.get_origin(kind)
    return origin is Literal


def _is_mapping(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_collection(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, str | bytes)


def _is_generic_collection(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return bool(typing.get_args(kind)) and _is_collection(origin) and not _is_mapping(origin)
