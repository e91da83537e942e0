"""Where values come from: a file, the environment, flags, Python. Each gives :class:`RawValue` values, still raw.

A source knows which keys exist and refuses others with a suggestion; it does not know types, except that a flag of a
boolean needs no value. Merging and conversion are in ``load.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trencadis.config.homes import where_it_belongs
from trencadis.config.messages import ARGUMENT, origin, value_error
from trencadis.config.settings import ENVIRONMENT_PREFIX, Settings
from trencadis.errors import ConfigError, UnknownKeyError, did_you_mean
from trencadis.files import check_plain, parse_toml, read_text

__all__ = [
    "BLOCKED_VARIABLE",
    "FILE_VARIABLE",
    "RawValue",
    "flat_names",
    "from_environment",
    "from_flags",
    "from_tree",
    "is_config_flag",
    "nest",
    "read_file",
    "split_flags",
]

_MAX_YAML_ITEMS = 10**6
"""A few lines of YAML may refer to each other and stand for more than a machine holds."""

FILE_VARIABLE = "TRENCADIS_CONFIG"
"""Environment variable that names the config file."""

BLOCKED_VARIABLE = "TRENCADIS_BLOCKED_PLUGINS"
"""Environment variable that adds to ``[plugins] blocked``, separated by commas."""


@attrs.frozen(kw_only=True)
class RawValue:
    """A value as a source gave it, before its type is checked.

    Attributes:
        path: Dotted path of the setting, or ``noun.options.key``.
        raw: Unconverted value: text from flags and the environment, else the value that the file or Python held.
        source: Such as ``serve.toml``, ``environment TRENCADIS_LOG__LEVEL`` or ``flag --log.level``.
        is_text: Still to be read as the setting's type says.
        may_import: The operator gave it, so that an import path in it is followed; else one is refused.
    """

    path: str
    raw: Any
    source: str
    is_text: bool = False
    may_import: bool = False


def read_file(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or of a YAML file if PyYAML is installed.

    Raises:
        ConfigError: It cannot be read, or is not well formed; with line and column.
    """
    try:
        text = read_text(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such config file.", hint="Correct --config or TRENCADIS_CONFIG.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.") from error
    if file.suffix in {".yaml", ".yml"}:
        return _read_yaml(file, text)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}.", hint="Correct the file at that place.") from error


def _read_yaml(file: Path, text: str) -> dict[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(
            f"{file}: a YAML file needs PyYAML, which is not installed.",
            hint="Run pip install pyyaml, or write the same tables as TOML.",
        ) from None
    try:
        tree = yaml.safe_load(text)
        check_plain(tree, max_items=_MAX_YAML_ITEMS)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{file}: not valid YAML: {getattr(error, 'problem', error)}{place}.") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: holds no tables.", hint="Write tables such as model: {path: demo}.")
    return tree


def from_tree(tree: Mapping[str, Any], settings: Settings, source: str, *, may_import: bool = False) -> list[RawValue]:
    """Return the values of nested tables. Pure.

    Args:
        tree: The tables.
        settings: The catalogue.
        source: Where they come from.
        may_import: From the operator: see :class:`RawValue`.

    Raises:
        UnknownKeyError: A table or key that does not exist.
        ConfigValueError: A value where a table is expected.
    """
    return [attrs.evolve(item, may_import=may_import) for item in _walk(tree, "", settings, source)]


def _walk(tree: Mapping[str, Any], table: str, settings: Settings, source: str) -> Iterator[RawValue]:
    for key, value in tree.items():
        path = f"{table}.{key}" if table else str(key)
        if table in settings.nouns and key == "options" and isinstance(value, Mapping):
            yield from (RawValue(path=f"{path}.{name}", raw=item, source=source) for name, item in value.items())
        elif settings.get(path) is not None:
            yield RawValue(path=path, raw=value, source=source)
        elif path not in settings.tables():
            raise _unknown(table, str(key), value, settings, source)
        elif isinstance(value, Mapping):
            yield from _walk(value, path, settings, source)
        else:
            raise value_error(path, value, source, f"must be a table: write [{path}] and its keys below.")


def _unknown(table: str, key: str, value: Any, settings: Settings, source: str) -> UnknownKeyError:
    home = where_it_belongs(key, value, settings, in_python=source == ARGUMENT)
    if not table and home and not isinstance(value, Mapping):
        return UnknownKeyError(f"{key}{origin(source)}: no such key. {home}")
    if not table:
        tables = [name for name in settings.tables() if "." not in name]
        found = (
            f"[{key}]{origin(source)}: no such table."
            if isinstance(value, Mapping)
            else f"{key}{origin(source)}: no such key."
        )
        return UnknownKeyError(f"{found}{did_you_mean(key, tables)} The tables are: {', '.join(tables)}.")
    if table in settings.nouns and isinstance(value, Mapping):
        names = settings.components_of(table)
        choices = f"Choose one of: {', '.join(names)}." if names else "No plugin offers any."
        return UnknownKeyError(
            f"[{table}.{key}]{origin(source)}: no such component.{did_you_mean(key, names)} {choices}"
        )
    keys = settings.keys_of(table)
    known = f"The table has: {', '.join(keys)}." if keys else "The table has no keys."
    meant = did_you_mean(key, keys) or f" {home}".rstrip()
    return UnknownKeyError(f"[{table}] {key}{origin(source)}: no such key.{meant} {known}")


def flat_names(settings: Settings) -> dict[str, str]:
    """Return the variable of each setting by its name with one underscore too few. Pure."""
    return {setting.environment.replace("__", "_"): setting.environment for setting in settings}


def from_environment(environ: Mapping[str, str], settings: Settings) -> list[RawValue]:
    """Return the values of variables named ``TRENCADIS_TABLE__KEY``. Pure.

    Others that start like ours are left alone: see ``unknown_variables.py``.

    Raises:
        UnknownKeyError: A variable of that shape that belongs to no setting, or that has one underscore too few.
    """
    known = {setting.environment: setting.path for setting in settings}
    flat = flat_names(settings)
    given = []
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in {FILE_VARIABLE, BLOCKED_VARIABLE}:
            continue
        tables = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name in known:
            path = known[name]
        elif len(tables) == 3 and tables[0] in settings.nouns and tables[1] == "options":
            path = ".".join(tables)
        elif name in flat:
            raise UnknownKeyError(f'environment {name}: no such setting. Did you mean "{flat[name]}"?')
        elif len(tables) == 1 and tables[0] in settings.tables():
            keys = ["name"] if tables[0] in settings.nouns else settings.keys_of(tables[0])
            meant = f"{name}__{keys[0].upper()}" if len(keys) == 1 else f"{name}__KEY"
            raise UnknownKeyError(
                f'environment {name}: [{tables[0]}] is a table and has no value of its own. Did you mean "{meant}"?',
                hint="Settings are named TRENCADIS_TABLE__KEY, with two underscores between table and key.",
            )
        elif len(tables) > 1:
            raise UnknownKeyError(
                f"environment {name}: no such setting.{did_you_mean(name, known)}",
                hint="trencadis config --explain lists every setting.",
            )
        else:
            continue
        given.append(RawValue(path=path, raw=text, source=f"environment {name}", is_text=True, may_import=True))
    return given


def is_config_flag(token: str) -> bool:
    """True for ``--table.key`` with or without ``=value``: only config flags have a dot in their name. Pure."""
    return token.startswith("--") and "." in token.partition("=")[0]


def split_flags(tokens: Sequence[str], settings: Settings) -> tuple[list[str], list[str]]:
    """Return a command line's config flags, each as ``--name=value``, and the rest. Pure.

    A boolean's flag needs no value. What follows ``--`` is no flag.

    Raises:
        UnknownKeyError: A flag of that shape that belongs to no setting.
        ConfigError: A flag without its value.
    """
    flags: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "--":
            return flags, [*rest, *tokens[position - 1 :]]
        if not is_config_flag(token):
            rest.append(token)
            continue
        name, has_value, value = token.partition("=")
        if not has_value:
            following = tokens[position] if position < len(tokens) else None
            value, width = _value_of(name, following, settings)
            position += width
        flags.append(f"{name}={value}")
    return flags, rest


def _value_of(name: str, following: str | None, settings: Settings) -> tuple[str, int]:
    """Return the value of a flag and how many tokens it took."""
    setting = settings.get(_path_of(name, settings))
    if setting is not None and setting.type is bool:
        if following is not None and following.lower() in {"true", "false"}:
            return following, 1
        return "true", 0
    if following is None or following.startswith("--"):
        raise ConfigError(f"flag {name}: no value.", hint=f"Write {name}=VALUE.")
    return following, 1


def _path_of(flag: str, settings: Settings) -> str:
    path = flag.removeprefix("--").replace("-", "_")
    tables = path.split(".")
    if settings.get(path) is not None or (len(tables) == 3 and tables[0] in settings.nouns and tables[1] == "options"):
        return path
    flags = [setting.flag for setting in settings]
    raise UnknownKeyError(
        f"flag {flag}: no such flag.{did_you_mean(flag, flags)}", hint="trencadis config --flags lists all of them."
    )


def from_flags(flags: Mapping[str, str] | Sequence[str], settings: Settings) -> list[RawValue]:
    """Return the values of config flags. Pure.

    Args:
        flags: Tokens such as ``["--engine.seed", "3"]``, or a mapping of flag to text.
        settings: The settings.

    Raises:
        UnknownKeyError: A flag that belongs to no setting.
        ConfigError: A token that is no config flag, or a flag without its value.
    """
    if isinstance(flags, Mapping):
        flags = [f"--{name.removeprefix('--')}={text}" for name, text in flags.items()]
    tokens, rest = split_flags(flags, settings)
    if rest:
        raise ConfigError(f"{rest[0]!r} is no config flag.", hint="A config flag reads --table.key VALUE.")
    given = []
    for token in tokens:
        name, _, text = token.partition("=")
        path = _path_of(name, settings)
        setting = settings.get(path)
        shown = name if setting is None else setting.flag
        given.append(RawValue(path=path, raw=text, source=f"flag {shown}", is_text=True, may_import=True))
    return given


def nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables for dotted paths: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``. Pure.

    Only the outermost keys are paths; those of a mapping that is a value stay as they are.

    Raises:
        ConfigError: One path leads through the value of another.
    """
    tree: dict[str, Any] = {}
    for path, value in overrides.items():
        for key in reversed(path.split(".")):
            value = {key: value}  # noqa: PLW2901 - built from the inside out
        _merge(tree, value, path)
    return tree


def _merge(tree: dict[str, Any], new: Mapping[str, Any], path: str) -> None:
    for key, value in new.items():
        old = tree.get(key)
        if not isinstance(old, dict) or not isinstance(value, Mapping):
            if isinstance(old, dict) is not isinstance(value, Mapping) and old is not None:
                raise ConfigError(f"argument {path}: leads through {key}, which another argument gives a value.")
            tree[key] = dict(value) if isinstance(value, Mapping) else value
        else:
            _merge(old, value, path)
