"""Tables whose names users choose, such as ``[scheduling.tenants.alice]``: a mapping of names to one config class."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trencadis.config.attribution import culprit, reason
from trencadis.config.messages import show
from trencadis.errors import did_you_mean

__all__ = ["is_named_tables", "structure_tables"]


def is_named_tables(kind: Any) -> bool:
    """Return whether a type is a mapping of names to a config class. Pure."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2 and attrs.has(arguments[1])


def structure_tables(kind: Any, value: Any, convert: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return config objects by name. Pure.

    Args:
        kind: Type for which :func:`is_named_tables` is true.
        value: Value from the file or from Python.
        convert: Called with a value and a type; returns the value of that type.

    Raises:
        ValueError: It is no mapping of mappings, a key is unknown, or a value is wrong; the message names table and key.
    """
    config_class = typing.get_args(kind)[1]
    if not isinstance(value, Mapping):
        raise ValueError("must be a table of tables.")
    return {str(name): _table(str(name), config_class, entry, convert) for name, entry in value.items()}


def _table(name: str, config_class: type[Any], entry: Any, convert: Callable[[Any, Any], Any]) -> Any:
    if isinstance(entry, config_class):
        return entry
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name} = {show(entry)} must be a table.")
    hints = typing.get_type_hints(config_class)
    keys = [field.name for field in attrs.fields(config_class)]
    values = {}
    for key, value in entry.items():
        if key not in keys:
            raise ValueError(f"{name}: no such key as {key}.{did_you_mean(str(key), keys)} It has: {', '.join(keys)}.")
        try:
            values[key] = convert(value, hints[key])
        except ValueError as error:
            raise ValueError(f"{name}: {key} = {show(value)}: {error}") from error
    try:
        return config_class(**values)
    except ValueError as error:
        found = culprit(config_class, values)
        if found is None:
            raise ValueError(f"{name}: {reason(None, None, error)}") from error
        field, objection = found
        value = values[field.name]
        raise ValueError(f"{name}: {field.name} = {show(value)} {reason(field.validator, value, objection)}") from error
