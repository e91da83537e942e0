"""RawValue values to one frozen ``Config``: types, validators, and what a component needs. Errors name key, value and source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.config.attribution import culprit, reason
from trencadis.config.convert import WrongValueError, describe_type, has_classes, is_readable, parse_text, structure
from trencadis.config.import_paths import import_paths_in, is_import_path, refuse_import_path
from trencadis.config.messages import DEFAULT, origin, value_error, with_origin
from trencadis.config.schema import Config
from trencadis.config.settings import CORE_TABLES, Setting, Settings
from trencadis.config.sources import RawValue
from trencadis.errors import ConfigError, ConfigValueError, UnknownKeyError

__all__ = ["ConfigBuilder", "check_defaults"]


class ConfigBuilder:
    """One assembling of a ``Config``.

    Args:
        settings: The catalogue.
        given: The winning value of each path that is set.
    """

    def __init__(self, settings: Settings, given: Mapping[str, RawValue]) -> None:
        self._settings = settings
        self._given = given
        self._typed = {setting.path: self._type(setting) for setting in settings if setting.path in given}
        self._options = {path: _option(item) for path, item in given.items() if settings.get(path) is None}

    def values(self) -> dict[str, Any]:
        """Return the typed value of every setting and option by path; ``attrs.NOTHING`` where a required one is missing."""
        return {setting.path: self._effective(setting) for setting in self._settings} | self._options

    def config(self) -> Config:
        """Return the tree.

        Raises:
            ConfigError: The configuration cannot be used; see :func:`trencadis.config.load_config`.
        """
        tables: dict[str, Any] = {}
        for name in (*CORE_TABLES, *self._settings.tables_of_plugins()):
            extra = {"components": self._components(name)} if name in self._settings.nouns else {}
            tables[name] = self._table(name, extra)
        own = {name: tables.pop(name) for name in self._settings.tables_of_plugins()}
        return Config(**tables, tables=own)

    def component(self, table: str) -> Any:
        """Return the config object of the component whose table this is; None where a required value is missing.

        Raises:
            ConfigError: The table cannot be used; see :func:`trencadis.config.load_config`.
        """
        return None if self._missing(table) else self._table(table, {})

    def _type(self, setting: Setting) -> Any:
        item = self._given[setting.path]
        raw = parse_text(setting.type, item.raw) if item.is_text else item.raw
        try:
            value = structure(setting.type, raw)
        except WrongValueError as error:
            raise value_error(setting.path, raw, item.source, str(error), secret=setting.secret) from error
        if not item.may_import:
            _check_no_import(setting, value, item.source)
        return value

    def _effective(self, setting: Setting) -> Any:
        return self._typed.get(setting.path, setting.default)

    def _table(self, table: str, extra: Mapping[str, Any]) -> Any:
        """Return an instance of a table's class."""
        config_class = self._settings.tables()[table]
        values: dict[str, Any] = dict(extra)
        for field in attrs.fields(config_class):
            path = f"{table}.{field.name}"
            setting = self._settings.get(path)
            if path in self._settings.tables():
                values[field.name] = self._table(path, {})
            elif setting is not None and (path in self._typed or setting.default is not attrs.NOTHING):
                values[field.name] = self._effective(setting)
        names = {field.name: field.alias for field in attrs.fields(config_class)}
        try:
            return config_class(**{names[name]: value for name, value in values.items()})
        except ConfigError as error:
            # A class that words its own objection does not know who set the values.
            error.args = (with_origin(str(error), {path: item.source for path, item in self._given.items()}),)
            raise
        except Exception as error:
            raise self._blamed(table, config_class, values, error) from error

    def _blamed(self, table: str, config_class: type[Any], values: Mapping[str, Any], error: Exception) -> ConfigError:
        found = culprit(config_class, values)
        if found is None:
            sources = {item.source for path, item in self._given.items() if path.startswith(f"{table}.")}
            return ConfigValueError(
                f"[{table}]{origin(', '.join(sorted(sources)) or DEFAULT)}: {reason(None, None, error)}"
            )
        field, objection = found
        path = f"{table}.{field.name}"
        setting = self._settings.get(path)
        value = values[field.name]
        source = self._given[path].source if path in self._given else DEFAULT
        secret = setting is not None and setting.secret
        return value_error(path, value, source, reason(field.validator, value, objection), secret=secret)

    def _components(self, noun: str) -> Mapping[str, Any]:
        """Return the config objects of a noun's components by name, and options under their import path."""
        named = self._named(noun)
        found: dict[str, Any] = {}
        for name in self._settings.components_of(noun):
            missing = self._missing(f"{noun}.{name}")
            if not missing:
                found[name] = self._table(f"{noun}.{name}", {})
            elif name in named:
                raise self._required(missing[0], noun, named[name])
        paths = [name for name in named if is_import_path(name)]
        options = {path.split(".", 2)[2]: value for path, value in self._options.items() if path.startswith(f"{noun}.")}
        if options and len(paths) != 1:
            raise self._misplaced_options(noun, named, paths)
        return found | {path: dict(options) for path in paths}

    def _named(self, noun: str) -> dict[str, str]:
        """Return the component names that a noun's own keys hold, each with its source."""
        named: dict[str, str] = {}
        for key in ("name", "fallback", "shadow", "names"):
            setting = self._settings.get(f"{noun}.{key}")
            if setting is None:
                continue
            value = self._effective(setting)
            source = self._given[setting.path].source if setting.path in self._given else DEFAULT
            for name in (value,) if isinstance(value, str) else value:
                named.setdefault(name, source)
        return named

    def _missing(self, table: str) -> list[Setting]:
        return [
            setting
            for setting in self._settings
            if setting.path.startswith(f"{table}.")
            and setting.attribute.default is attrs.NOTHING
            and setting.path not in self._typed
        ]

    def _required(self, setting: Setting, noun: str, source: str) -> ConfigValueError:
        component = setting.table.removeprefix(f"{noun}.")
        return ConfigValueError(
            f'[{setting.table}] {setting.key}: no value, and the {noun} component "{component}"{origin(source)} needs one.',
            hint=f"Set it in the config file, with {setting.flag} or with {setting.environment}.",
        )

    def _misplaced_options(self, noun: str, named: Mapping[str, str], paths: list[str]) -> UnknownKeyError:
        source = next(item.source for path, item in self._given.items() if path.startswith(f"{noun}.options."))
        if paths:
            why = f"they could belong to any of: {', '.join(paths)}"
            hint = "Give one component by import path at a time, or make the others plugins."
        else:
            why = (
                f"only a component given by import path takes options, and [{noun}] names {', '.join(named) or 'none'}"
            )
            hint = f"Write a component's own keys in its table, [{noun}.NAME]."
        return UnknownKeyError(f"[{noun}.options]{origin(source)}: {why}.", hint=hint)


def _option(item: RawValue) -> Any:
    value = parse_text(object, item.raw) if item.is_text else item.raw
    if not item.may_import:
        for path in import_paths_in(value):
            raise refuse_import_path(item.path, path, item.source)
    return value


def _check_no_import(setting: Setting, value: Any, source: str) -> None:
    """Refuse a value that names code to import and does not come from the operator.

    Raises:
        ImportPathRefusedError: It does.
    """
    if setting.names_component:
        for name in (value,) if isinstance(value, str) else value:
            if is_import_path(name):
                raise refuse_import_path(setting.path, name, source)
    for path in import_paths_in(value):
        raise refuse_import_path(setting.path, path, source)


def check_defaults(settings: Settings, table: str) -> None:
    """Refuse settings that no source could give, and defaults that their validators refuse. Pure but for what defaults make.

    Args:
        settings: Settings of one component's config class.
        table: Dotted path of the table, such as ``bucketing.exponential``.

    Raises:
        ConfigValueError: A type is none that configuration can hold, or a default is of another type or refused by the class.
    """
    for setting in settings:
        _check_type(setting)
    ConfigBuilder(settings, {}).component(table)


def _check_type(setting: Setting) -> None:
    if not is_readable(setting.type):
        raise ConfigValueError(
            f"[{setting.table}] {setting.key}: its type is {describe_type(setting.type)}, which no configuration can hold."
        )
    is_converted = setting.attribute.converter is not None
    if setting.default is attrs.NOTHING or is_converted or has_classes(setting.type):
        return
    try:
        structure(setting.type, setting.default)
    except WrongValueError as error:
        raise value_error(setting.path, setting.default, DEFAULT, str(error), secret=setting.secret) from error
