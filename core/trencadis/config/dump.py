"""A configuration back to plain tables, to be handed to another process: loaded as overrides they give an equal one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import attrs

from trencadis.config.import_paths import is_import_path
from trencadis.config.schema import Config, FixedNounConfig
from trencadis.config.settings import CORE_TABLES

__all__ = ["dump_config", "dump_options"]


def dump_config(config: Config, *, secrets: bool = True) -> dict[str, Any]:
    """Return every value of a configuration as nested tables of plain Python values. Pure.

    ``load_config(components=..., environ={}, overrides=dump_config(config)).config == config`` for the same components.

    Args:
        config: Resolved.
        secrets: With values that the schema marks as secret, and with tables of applications.
    """
    shown = {name: table for name, table in config.tables.items() if secrets or isinstance(table, FixedNounConfig)}
    tables = {name: getattr(config, name) for name in CORE_TABLES} | shown
    return {name: _table(table, secrets=secrets) for name, table in tables.items()}


def dump_options(options: Any) -> dict[str, Any]:
    """Return a component's options as a table of plain values to show, secrets as ``***``. Pure.

    Args:
        options: An instance of its config class, or a mapping of one given by import path.
    """
    if isinstance(options, Mapping):
        return {str(key): _plain(item) for key, item in options.items()}
    secrets = {field.name for field in attrs.fields(type(options)) if field.metadata.get("secret")}
    return {name: "***" if name in secrets and value else value for name, value in _table(options).items()}


def _table(instance: Any, *, secrets: bool = True) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in attrs.fields(type(instance)):
        if not field.init or (field.metadata.get("secret") and not secrets):
            continue
        value = getattr(instance, field.name)
        if field.name == "components":
            table |= _components(value, secrets=secrets)
        else:
            table[field.name] = _plain(value)
    return table


def _components(components: Mapping[str, Any], *, secrets: bool) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, options in components.items():
        if not is_import_path(name):
            tables[name] = _table(options, secrets=secrets)
        elif options:
            tables["options"] = _plain(options)
    return tables


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return _table(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
