"""Configuration loading: defaults < file < environment < flags < Python, each value with its source.

file ┐
env  ├▶ RawValue(path, raw, source) ▶ the last one of a path wins ▶ typed ▶ one frozen Config
flags┘
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from trencadis.config.aliases import from_aliases, warn_of_unused
from trencadis.config.builder import ConfigBuilder
from trencadis.config.messages import ARGUMENT, DEFAULT
from trencadis.config.schema import BUCKETING_BY_LAYOUT, Config, PluginsConfig
from trencadis.config.settings import ENVIRONMENT_PREFIX, ComponentClasses, Settings, settings_of, settings_of_table
from trencadis.config.sources import (
    BLOCKED_VARIABLE,
    FILE_VARIABLE,
    RawValue,
    from_environment,
    from_flags,
    from_tree,
    nest,
    read_file,
)
from trencadis.config.unknown_variables import unknown_variables, warn_of_unknown
from trencadis.errors import ConfigError

__all__ = ["ConfigFile", "ResolvedConfig", "load_config", "plugin_rules", "read_config_file", "rules_or_defaults"]

_PLUGINS = "plugins"
_BLOCKED = "plugins.blocked"


@attrs.frozen
class ConfigFile:
    """The content of a configuration file, read once per process and handed to all that takes values from it.

    Attributes:
        name: Name of the file, for sources; empty if there is none.
        error: Why the file cannot be read; None: it can be.
        may_import: It is the operator's own, so that import paths in it are followed; else they are refused.
    """

    _tables: Mapping[str, Any] = {}
    name: str = ""
    error: ConfigError | None = None
    may_import: bool = attrs.field(default=False, kw_only=True)

    @property
    def tree(self) -> Mapping[str, Any]:
        """Tables and values; empty if there is no file.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.error is not None:
            raise self.error
        return self._tables


def read_config_file(file: Path | None = None, environ: Mapping[str, str] | None = None) -> ConfigFile:
    """Return the content of a configuration file; one that is missing or not well formed raises where its tables are used.

    Args:
        file: A TOML or YAML file; none: the one that ``TRENCADIS_CONFIG`` names, if any.
        environ: The environment; none: this process's own.
    """
    named = file or (os.environ if environ is None else environ).get(FILE_VARIABLE)
    if not named:
        return ConfigFile()
    path = Path(named)
    try:
        return ConfigFile(read_file(path), path.name, may_import=True)
    except ConfigError as error:
        return ConfigFile(name=path.name, error=error)


@attrs.frozen(kw_only=True)
class ResolvedConfig:
    """A configuration and where it came from.

    Attributes:
        config: The frozen tree.
        sources: By dotted path: ``default``, a file name, ``environment NAME``, ``flag --name`` or ``argument``.
        values: The typed values by dotted path, options of import-path components included.
        settings: The catalogue the configuration was loaded with.
        unknown: Variables of the environment that have no effect, each with advice.
    """

    config: Config
    sources: Mapping[str, str]
    values: Mapping[str, Any]
    settings: Settings = attrs.field(repr=False, eq=False)
    unknown: Mapping[str, str] = attrs.field(factory=dict, repr=False, eq=False)


def load_config(
    *,
    components: ComponentClasses | None = None,
    settings: Settings | None = None,
    file: Path | ConfigFile | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    may_import: bool = True,
    on_error: Callable[[ConfigError], None] | None = None,
) -> ResolvedConfig:
    """Return the configuration that all sources make together. Reads the file; else pure but for warnings.

    Args:
        components: Config classes that plugins bring, of components and of tables of their own; none: no tables of theirs.
        settings: The catalogue of these, if it has been built already.
        file: A TOML or YAML file, or the content of one; none: the file that ``TRENCADIS_CONFIG`` names, if any.
        environ: The environment; none: this process's own.
        flags: Tokens ``["--engine.seed", "3"]``, or a mapping of flag to text.
        overrides: Dotted path to value, from Python; wins over everything.
        may_import: Flags and overrides are the operator's own; False: they were read from a received file.
        on_error: Called for each wrong value of file, environment and flags, which then does not count, and for values that contradict
            each other: then the defaults count. Unknown variables are not logged. None: the first error is raised.

    Raises:
        ImportPathRefusedError: An import path, in a value that is not the operator's.
        UnknownKeyError: A table, key, variable or flag that does not exist.
        ConfigValueError: A value of the wrong type or out of range, or a required one that is missing.
        ConfigError: The file is missing or not well formed.
    """
    settings = settings or settings_of(components)
    environment = os.environ if environ is None else environ
    content = _content(file, environment)
    if on_error is None:
        items = _gather(settings, content, environment, flags, overrides or {}, may_import)
    else:
        items = _valid(settings, content, environment, flags, on_error)
    given = {item.path: item for item in items}
    _add_blocked(given, environment)
    builder = ConfigBuilder(settings, given)
    try:
        config = builder.config()
    except ConfigError as error:
        # Each value may be right, and two of them together wrong: only loading all of them tells.
        if on_error is None:
            raise
        on_error(error)
        given, builder = {}, ConfigBuilder(settings, {})
        config = builder.config()
    unknown = unknown_variables(environment, settings)
    if on_error is None:
        warn_of_unknown(unknown)
    _warn(config, given.values(), environment, settings)
    sources = {setting.path: DEFAULT for setting in settings} | {path: item.source for path, item in given.items()}
    return ResolvedConfig(
        config=config,
        sources=MappingProxyType(sources),
        values=MappingProxyType(builder.values()),
        settings=settings,
        unknown=unknown,
    )


def _warn(config: Config, given: Iterable[RawValue], environ: Mapping[str, str], settings: Settings) -> None:
    name = config.bucketing.name
    # Which one "auto" is, the backend's layout says.
    may_be = BUCKETING_BY_LAYOUT.values() if name == "auto" else (name,)
    warn_of_unused(given, environ, settings, name=name, may_be=(*may_be, config.bucketing.fallback))


def plugin_rules(
    *,
    file: Path | ConfigFile | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> PluginsConfig:
    """Return the table ``[plugins]`` from all sources: it must be known before any plugin, and so any other key, is.

    Args:
        file: See :func:`load_config`.
        environ: See :func:`load_config`.
        flags: A whole command line; all but the flags of this table are left alone.
        overrides: See :func:`load_config`.

    Raises:
        ConfigError: The file is missing or not well formed, or a value is of the wrong type.
    """
    environment = os.environ if environ is None else environ
    settings = settings_of_table(_PLUGINS, PluginsConfig)
    content = _content(file, environment)
    names = {setting.environment for setting in settings}
    given = from_tree(_only_plugins(content.tree), settings, content.name, may_import=content.may_import)
    given += from_environment({key: text for key, text in environment.items() if key in names}, settings)
    given += from_flags(_flags_of_plugins(flags, settings), settings)
    given += from_tree(_only_plugins(nest(overrides or {})), settings, ARGUMENT, may_import=True)
    last = {item.path: item for item in given}
    _add_blocked(last, environment)
    rules: PluginsConfig = ConfigBuilder(settings, last).component(_PLUGINS)
    return rules


def rules_or_defaults(file: ConfigFile, flags: Sequence[str], environ: Mapping[str, str]) -> PluginsConfig:
    """Return the table ``[plugins]``; the default if it cannot be known, which loading everything then says."""
    try:
        return plugin_rules(file=file, flags=flags, environ=environ)
    except ConfigError:
        return PluginsConfig()


def _valid(
    settings: Settings,
    content: ConfigFile,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | Sequence[str],
    on_error: Callable[[ConfigError], None],
) -> Iterator[RawValue]:
    """Yield every value that is right by itself, the weakest source first."""
    readers: list[Callable[[], list[RawValue]]] = []
    if content.error is not None:
        on_error(content.error)
    else:
        read_leaf = partial(from_tree, settings=settings, source=content.name, may_import=content.may_import)
        readers += [partial(read_leaf, nested) for nested in _leaves(content.tree)]
    readers.append(partial(from_aliases, environ, settings))
    for name, text in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            readers.append(partial(from_environment, {name: text}, settings))
    readers += [partial(from_flags, [flag], settings) for flag in flags]
    for read in readers:
        try:
            for item in read():
                if settings.get(item.path) is not None:
                    ConfigBuilder(settings, {item.path: item}).config()
                yield item
        except ConfigError as error:
            on_error(error)


def _leaves(tree: Mapping[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield trees with one key of one table each; tables in tables, those of components, one level further."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and depth < 2:
            yield from ({key: inner} for inner in _leaves(value, depth + 1))
        else:
            yield {key: value}


def _gather(
    settings: Settings,
    content: ConfigFile,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | Sequence[str],
    overrides: Mapping[str, Any],
    may_import: bool,
) -> Iterable[RawValue]:
    """Yield every given value, the weakest source first."""
    yield from from_tree(content.tree, settings, content.name, may_import=content.may_import)
    yield from from_aliases(environ, settings)
    yield from from_environment(environ, settings)
    yield from (attrs.evolve(item, may_import=may_import) for item in from_flags(flags, settings))
    yield from from_tree(nest(overrides), settings, ARGUMENT, may_import=may_import)


def _content(file: Path | ConfigFile | None, environ: Mapping[str, str]) -> ConfigFile:
    return file if isinstance(file, ConfigFile) else read_config_file(file, environ)


def _only_plugins(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys of the table; what else is wrong with it is said when everything is loaded."""
    table = tree.get(_PLUGINS)
    keys = [field.name for field in attrs.fields(PluginsConfig)]
    return {_PLUGINS: {key: table[key] for key in keys if key in table}} if isinstance(table, Mapping) else {}


def _flags_of_plugins(tokens: Sequence[str], settings: Settings) -> list[str]:
    found: list[str] = []
    for position, token in enumerate(tokens):
        if token == "--":
            break
        setting = settings.get(token.partition("=")[0].removeprefix("--").replace("-", "_"))
        if setting is None:
            continue
        following = tokens[position + 1 : position + 2]
        takes_it = "=" not in token and (setting.type is not bool or following in (["true"], ["false"]))
        found += [token, *following] if takes_it else [token]
    return found


def _add_blocked(given: dict[str, RawValue], environ: Mapping[str, str]) -> None:
    """Add what ``TRENCADIS_BLOCKED_PLUGINS`` blocks to what the other sources block."""
    added = [name.strip() for name in environ.get(BLOCKED_VARIABLE, "").split(",") if name.strip()]
    if not added:
        return
    before = given.get(_BLOCKED)
    names: Any = () if before is None else before.raw
    if before is not None and before.is_text:
        names = [name.strip() for name in names.split(",") if name.strip()]
    if isinstance(names, list | tuple):
        joined = tuple(dict.fromkeys([*names, *added]))
        source = (
            f"environment {BLOCKED_VARIABLE}" if before is None else f"{before.source}, environment {BLOCKED_VARIABLE}"
        )
        given[_BLOCKED] = RawValue(path=_BLOCKED, raw=joined, source=source, may_import=True)
