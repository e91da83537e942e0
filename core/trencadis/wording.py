"""How messages show values that clients and plugins give: in bounded time, memory and length."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

__all__ = ["cut", "shown"]

_MAX_ITEMS: Final = 8
_MAX_DEPTH: Final = 3
_MAX_TEXT: Final = 120
_MAX_SHOWN: Final = 300


def shown(value: object) -> str:
    """Return a value of a client or a plugin for a message: some 300 characters at most, in bounded time and memory. Pure.

    Of a long sequence the first items and the number of all are shown; of objects of unknown classes the class alone, since their
    ``__repr__`` may do anything.
    """
    try:
        return cut(_shown(value, _MAX_DEPTH), _MAX_SHOWN)
    except Exception:  # a class whose attributes raise
        return f"<{type(value).__name__}>"


def cut(text: str, most: int) -> str:
    """Return a text; of one that is longer than ``most`` characters its beginning and how many it has. Pure."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _shown(value: object, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return _shown_int(value)  # type: ignore[arg-type] # told by its exact class
    if kind is str or kind is bytes:
        return _shown_text(value)  # type: ignore[arg-type] # the same
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, Path):
        return _shown_text(str(value))
    if isinstance(value, np.generic):
        return _shown(value.item(), depth)
    if isinstance(value, np.ndarray):
        return _shown_array(value, depth)
    if not depth:
        return "…"
    return _shown_items(value, depth - 1)


def _shown_int(value: int) -> str:
    bits = value.bit_length()
    return str(value) if bits <= 256 else f"<int of {bits} bits>"


def _shown_text(value: str | bytes) -> str:
    if len(value) <= _MAX_TEXT:
        return repr(value)
    return f"{value[:_MAX_TEXT]!r}… ({len(value)} {'characters' if isinstance(value, str) else 'bytes'})"


def _shown_array(value: np.ndarray[Any, Any], depth: int) -> str:
    if value.ndim == 1 and value.size <= _MAX_ITEMS:
        return _shown(value.tolist(), max(1, depth))
    first = ", ".join(_shown(item, 0) for item in itertools.islice(value.flat, _MAX_ITEMS))
    return f"[{first}{', …' if value.size > _MAX_ITEMS else ''}] (shape {value.shape}, {value.dtype})"


def _shown_items(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque, range):
        left, right = "()" if kind is tuple else "{}" if kind in (set, frozenset) else "[]"
        return left + _listed((_shown(item, depth) for item in itertools.islice(value, _MAX_ITEMS)), len(value)) + right
    if kind is dict:
        pairs = itertools.islice(value.items(), _MAX_ITEMS)
        return "{" + _listed((f"{_shown(key, depth)}: {_shown(item, depth)}" for key, item in pairs), len(value)) + "}"
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    if attrs.has(kind):
        names = [field.name for field in attrs.fields(kind)]
    if names and kind.__module__.partition(".")[0] == "trencadis":
        fields = (f"{name}={_shown(getattr(value, name), depth)}" for name in names[:_MAX_ITEMS])
        return f"{kind.__name__}({_listed(fields, len(names))})"
    return f"<{kind.__qualname__}>"


def _listed(items: Iterable[str], number: int) -> str:
    return ", ".join(items) + (f", … {number} in all" if number > _MAX_ITEMS else "")
