"""How config errors are worded: one place for the shape ``[table] key = value (from source): reason``."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigValueError

__all__ = ["ARGUMENT", "DEFAULT", "origin", "show", "spot", "value_error", "with_origin"]

_SPOT = re.compile(r'\[([\w.-]+)\] (\w+) = ("(?:[^"\\]|\\.)*"|[^\s",:]++)(?! \()')

DEFAULT = "default"
"""The source of a value that was not set."""

ARGUMENT = "argument"
"""The source of a value that Python gave."""


def show(value: Any) -> str:
    """Return a value as TOML would write it. Pure."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return show(value.value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if attrs.has(type(value)):
        return show(attrs.asdict(value, recurse=False))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return show(sorted(value, key=str))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return "none" if value is None else str(value)


def origin(source: str) -> str:
    """Return ``' (from serve.toml)'``, ``' (the default)'``, or nothing if the source is not known. Pure."""
    if not source:
        return ""
    return " (the default)" if source == DEFAULT else f" (from {source})"


def spot(path: str, value: Any, source: str, *, secret: bool = False) -> str:
    """Return ``[table] key = value (from source)``, without the table at the top level. Pure."""
    table, _, key = path.rpartition(".")
    shown = "***" if secret else show(value)
    return f"{f'[{table}] ' if table else ''}{key} = {shown}{origin(source)}"


def value_error(path: str, value: Any, source: str, reason: str, *, secret: bool = False) -> ConfigValueError:
    """Return the error for a value of the wrong type or out of range. Pure."""
    return ConfigValueError(f"{spot(path, value, source, secret=secret)}: {reason}")


def with_origin(message: str, sources: Mapping[str, str]) -> str:
    """Return a message that starts with ``[table] key = value`` with the value's source after it. Pure.

    A component knows its options, but not who set them. A message of another form, with a source, or about a value that
    was not set, is returned as it is; where one value contradicts another, each gets its source, the default as well.

    Args:
        message: Message of an error.
        sources: Who set each value, by dotted path.
    """
    match = _SPOT.match(message)
    if match is None:
        return message
    is_alone = _SPOT.search(message, match.end()) is None

    def with_its_own(found: re.Match[str]) -> str:
        source = sources.get(f"{found[1]}.{found[2]}", "")
        return found[0] + ("" if is_alone and source == DEFAULT else origin(source))

    return _SPOT.sub(with_its_own, message)
