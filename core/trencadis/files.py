"""The one door for files that people write and send: text, JSON and TOML, bounded, so that a caller has to expect nothing but two errors.

    path ▶ read_text ▶ parse_json | parse_toml ▶ plain values: at most MAX_DEPTH deep, numbers that are numbers, text that can be written

Each raises ``OSError`` or ``ValueError``, in words; the caller says which file and what to do.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "check_plain",
    "is_file",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_json",
    "read_text",
    "read_toml",
]

MAX_BYTES: Final = 2**30
"""Size of a file at most."""

MAX_DEPTH: Final = 64
"""Tables and lists within each other."""

_MAX_INT: Final = 2**64
_SUSPECT: Final = re.compile(r"\d{19}|[eE]\+?\d{3}|\\u[dD][89a-fA-F]|NaN|Infinity")
"""What a document has that holds a number which is none, or text that is none."""


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file; also False for what can be no name of one."""
    return os.path.isfile(path)  # unlike Path.is_file it raises for no name


def read_bytes(path: str | Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file or of a pipe.

    Args:
        path: The file.
        max_bytes: The most that is read.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none: a directory, a device, a pipe; or it is larger, or its name is none.
    """
    found = os.stat(path)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):  # to open a device may do anything
        raise ValueError("it is neither a regular file nor a pipe")
    if found.st_size > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def read_text(path: str | Path, *, encoding: str = "utf-8", max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file or of a pipe, with its line ends as they are.

    Args:
        path: The file.
        encoding: ``utf-8``, ``utf-8-sig`` or ``ascii``.
        max_bytes: The most that is read.

    Raises:
        OSError: See :func:`read_bytes`.
        ValueError: The same; or it is no text.
    """
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in {encoding.removesuffix('-sig').upper()}: {error}") from None


def read_json(path: str | Path, *, allows_infinity: bool = False) -> Any:
    """Return what a JSON file holds; see :func:`read_text` and :func:`parse_json`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or holds what :func:`parse_json` refuses.
    """
    return parse_json(read_text(path), allows_infinity=allows_infinity)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; see :func:`read_text` and :func:`parse_toml`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or holds what :func:`parse_toml` refuses.
    """
    return parse_toml(read_text(path))


def parse_json(text: str, *, allows_infinity: bool = False) -> Any:
    """Return what a JSON text holds. Pure.

    Args:
        text: One document.
        allows_infinity: ``Infinity`` is a number.

    Raises:
        ValueError: It is not well formed, too deep, or has NaN, an infinite number, an integer beyond 64 bits or half a character.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is more than {MAX_DEPTH} tables and lists deep") from None
    _check(text, value, allows_infinity=allows_infinity)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Pure.

    Raises:
        ValueError: It is not well formed, too deep, or has NaN, an integer beyond 64 bits or a NUL in it.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is more than {MAX_DEPTH} tables and lists deep") from None
    _check(text, tables, allows_infinity=True, is_toml=True)
    return tables


def _check(text: str, value: Any, *, allows_infinity: bool, is_toml: bool = False) -> None:
    """Refuse values that no caller expects; a document without suspects is not walked through."""
    is_deep = is_toml or text.count("[") + text.count("{") > MAX_DEPTH
    if is_deep or _SUSPECT.search(text):
        check_plain(value, allows_infinity=allows_infinity)


def check_plain(value: Any, *, allows_infinity: bool = True, max_items: int | None = None) -> None:
    """Refuse plain values, of whatever kind of file, that no caller expects. Pure.

    Args:
        value: Tables, lists, texts, numbers.
        allows_infinity: An infinite number is one.
        max_items: The most values in it, one that is referred to several times counted as often; None: any number.

    Raises:
        ValueError: It is too deep or too large, or has NaN, an infinite number, an integer beyond 64 bits or half a character.
    """
    for number, (item, depth) in enumerate(_walk(value)):
        if max_items is not None and number > max_items:
            raise ValueError(f"it has more than {max_items:,} values")
        _check_item(item, depth, allows_infinity=allows_infinity)


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value and key with its depth, without recursion."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        yield item, depth
        if depth > MAX_DEPTH:
            continue
        if isinstance(item, dict):
            todo += [(key, depth) for key in item]
            todo += [(one, depth + 1) for one in item.values()]
        elif isinstance(item, list):
            todo += [(one, depth + 1) for one in item]


def _check_item(item: Any, depth: int, *, allows_infinity: bool) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is more than {MAX_DEPTH} tables and lists deep")
    if isinstance(item, float) and not math.isfinite(item) and (math.isnan(item) or not allows_infinity):
        raise ValueError(f"{item} is no number")
    if isinstance(item, int) and abs(item) > _MAX_INT:
        raise ValueError("an integer in it has more than 64 bits")
    if isinstance(item, str):
        try:
            item.encode()
        except UnicodeEncodeError:
            raise ValueError("a text in it has half a character, a lone surrogate") from None
