"""Values that can be sent to another process and written as JSON: which are refused, and where the fault is.

A value is checked as a whole at the speed of C; the path to a fault is built when there is one.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from trencadis.errors import InvalidRequestError

__all__ = ["MAX_DEPTH", "check_plain", "is_text", "plain_fault"]

MAX_DEPTH = 32
"""Lists and objects inside one another; what parses and encodes values calls itself for each level."""

_MAX_KEY_SHOWN = 80
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_CONTAINERS = (dict, list, tuple)
_PROBLEMS = (OverflowError, TypeError, ValueError, RecursionError)
"""What encoding raises for a value that cannot be encoded; ``UnicodeEncodeError`` is a ``ValueError``."""


def check_plain(value: Any, name: str) -> None:
    """Refuse a value that cannot be encoded: a whole number beyond 64 bits, half a surrogate pair, another type, deep nesting.

    Args:
        value: Value of any type.
        name: Name of the parameter that holds it; the error names the place within.

    Raises:
        InvalidRequestError: It cannot be encoded.
    """
    fault = plain_fault(value)
    if fault is not None:
        where, why = fault
        raise InvalidRequestError(f"{name}{where} {why}.", field=name)


def plain_fault(value: Any, *, is_json: bool = False) -> tuple[str, str] | None:
    """Return the place of the first fault of a value and what is wrong there, or None. Pure; O(size), without a call for each element.

    Args:
        value: Value of any type.
        is_json: Infinity and NaN, which JSON does not have, are faults, too.

    Returns:
        A path such as ``.a[3]``, empty for the value itself, and a clause such as ``is beyond 64 bits``.
    """
    if not is_json and _is_encodable(value) and not _is_deep(value):
        return None
    found = _find(value, MAX_DEPTH, is_json)
    if found is None and not is_json:
        found = [], "cannot be encoded"
    return None if found is None else ("".join(reversed(found[0])), found[1])


def is_text(value: Any) -> bool:
    """Return whether this is a string that UTF-8 can hold: one without half a surrogate pair. Pure."""
    if not isinstance(value, str):
        return False
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_encodable(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except _PROBLEMS:
        return False
    return True


def _is_deep(value: Any) -> bool:
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def _find(value: Any, depth: int, is_json: bool) -> tuple[list[str], str] | None:
    """Return the steps to the first fault, the last one first, and what is wrong; None: there is none."""
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        why = _scalar_fault(value, is_json)
        return ([], why) if why else None
    if depth < 0:
        return [], f"is nested more than {MAX_DEPTH} levels deep"
    for key, inner in items:
        if isinstance(value, dict) and (found := _text_fault(key) if isinstance(key, str) else _find(key, 0, is_json)):
            return [], f"has a key that {found[1]}"
        if found := _find(inner, depth - 1, is_json):
            steps, why = found
            steps.append(f".{ascii(str(key)[:_MAX_KEY_SHOWN])[1:-1]}" if isinstance(value, dict) else f"[{key}]")
            return steps, why
    return None


def _text_fault(text: str) -> tuple[list[str], str] | None:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return [], f"has half a surrogate pair at character {error.start}: this is no text"
    return None


def _scalar_fault(value: Any, is_json: bool) -> str:
    if value is None or isinstance(value, bool | bytes):
        return ""
    if isinstance(value, int):
        return "" if _MIN_INT <= value <= _MAX_INT else "is a whole number beyond 64 bits"
    if isinstance(value, float):
        return "is no finite number" if is_json and not math.isfinite(value) else ""
    return f"is of the type {type(value).__name__}, which cannot be sent to an engine"
