"""Where a key belongs that stands in no table, or in the wrong one, or has the name that another engine gives it."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.config.messages import show
from trencadis.config.settings import Setting, Settings
from trencadis.errors import closest
from trencadis.records import SamplingParams

__all__ = ["where_it_belongs"]

_CLOSE = 0.8
"""How like a key must be: it is looked for among those of all tables."""


def where_it_belongs(key: str, value: Any, settings: Settings, *, in_python: bool) -> str:
    """Return a sentence that says how to write a value that was given under an unknown key; empty: it is not known. Pure.

    Args:
        key: Key that was given.
        value: Value that was given.
        settings: The catalogue.
        in_python: An argument of ``LLM``; else a key of a file.
    """
    found = [setting for setting in settings if setting.key == key]
    if len(found) == 1:
        return f"Write {_written(found[0], value, in_python)}."
    foreign = _of_other_engines(key, value, settings, in_python)
    if foreign:
        return foreign
    if found:
        return f"It is a key of several tables. Write {_choices(found, value, in_python)}."
    if in_python and key in {field.name for field in attrs.fields(SamplingParams)}:
        return f"It is a sampling parameter: SamplingParams({key}={value!r})."
    typo_of = closest(key, sorted({setting.key for setting in settings}), cutoff=_CLOSE)
    meant = [setting for setting in settings if setting.key == typo_of]
    return f"Did you mean {_choices(meant, value, in_python)}?" if meant else ""


def _of_other_engines(key: str, value: Any, settings: Settings, in_python: bool) -> str:
    from trencadis.other_engines import counterparts, listed, spelt

    sentences = []
    for row in counterparts(key):
        note = f" ({row.said})" if row.note else ""
        whose = f"It is an option of {listed(row.engines(spelt(key)))}."
        meant = [setting for path in row.settings if (setting := settings.get(path)) is not None]
        if row.flag:
            name = row.flag.removeprefix("--").replace("-", "_")
            sentences.append(f"{whose} Here it is a sampling parameter, SamplingParams({name}={value!r}).")
        elif not row.settings:
            sentences.append(f"{whose} Here there is none: {row.said}.")
        elif meant:
            given = _fitting(row.value) if row.value else row.scaled(value)
            sentences.append(f"{whose} Here it is {_choices(meant, given, in_python)}{note}.")
    return " ".join(sentences)


def _fitting(text: str) -> Any:
    return {"true": True, "false": False}.get(text, text)


def _choices(found: list[Setting], value: Any, in_python: bool) -> str:
    return " or ".join(_written(setting, value, in_python) for setting in found)


def _written(setting: Setting, value: Any, in_python: bool) -> str:
    shown: Any = "..." if setting.secret else show(value) if isinstance(value, str) or not in_python else repr(value)
    if not in_python:
        return f"[{setting.table}] {setting.key} = {shown}"
    inner = f'"{setting.key}": {shown}'
    first, *others = setting.table.split(".")
    for table in reversed(others):
        inner = f'"{table}": {{{inner}}}'
    # The argument of that name is the path itself, unless it is a table.
    path = '"path": "...", ' if first == "model" and setting.key != "path" else ""
    return f"{first}={{{path}{inner}}}"
