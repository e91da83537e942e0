"""Every source of the configuration and every value by itself, so that one look shows all that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from trencadis.config.builder import ConfigBuilder
from trencadis.config.load import ConfigFile, ResolvedConfig, load_config, plugin_rules
from trencadis.config.schema import PluginsConfig
from trencadis.config.settings import ENVIRONMENT_PREFIX, Settings
from trencadis.config.sources import RawValue, from_environment, from_flags, from_tree
from trencadis.config.unknown_variables import unknown_variables
from trencadis.errors import ConfigError

__all__ = ["SourceCheck", "check_sources", "rules_or_defaults"]


@attrs.frozen(kw_only=True)
class SourceCheck:
    """What is wrong with the sources of a configuration, and the configuration that their valid values make.

    Attributes:
        errors: One for each wrong value, and for a file that cannot be read.
        unknown: Variables of the environment that have no effect, each with advice.
        counts: Number of valid values by source: a file's name, ``environment``, ``flag``; the file's is there even if 0.
        resolved: Configuration of the valid values; of the defaults alone where these contradict each other.
    """

    errors: tuple[ConfigError, ...]
    unknown: Mapping[str, str]
    counts: Mapping[str, int]
    resolved: ResolvedConfig


def rules_or_defaults(file: ConfigFile, flags: Sequence[str], environ: Mapping[str, str]) -> PluginsConfig:
    """Return the table ``[plugins]``; the default if it cannot be known, which :func:`check_sources` then says."""
    try:
        return plugin_rules(file=file, flags=flags, environ=environ)
    except ConfigError:
        return PluginsConfig()


def check_sources(
    settings: Settings, *, file: ConfigFile, flags: Sequence[str], environ: Mapping[str, str]
) -> SourceCheck:
    """Check file, environment and flags value by value; raises nothing.

    Args:
        settings: The catalogue with the tables of all plugins that can be loaded.
        file: The content of the configuration file.
        flags: Config flags.
        environ: The environment.
    """
    errors: list[ConfigError] = []
    good: dict[str, RawValue] = {}
    for values in _values(settings, file, flags, environ, errors):
        try:
            for item in values():
                alone = {item.path: item}
                if settings.get(item.path) is not None:
                    ConfigBuilder(settings, alone).config()
                good.update(alone)
        except ConfigError as error:
            errors.append(error)
    unknown = unknown_variables(environ, settings)
    # Reported here: loading need not warn of them again.
    environ = {name: text for name, text in environ.items() if name not in unknown}
    counts = Counter(item.source.split(" ")[0] for item in good.values())
    if file.name:
        counts.setdefault(file.name, 0)
    resolved = _resolved(settings, good, errors, file=file, flags=flags, environ=environ)
    return SourceCheck(errors=tuple(errors), unknown=unknown, counts=counts, resolved=resolved)


def _resolved(
    settings: Settings,
    good: Mapping[str, RawValue],
    errors: list[ConfigError],
    *,
    file: ConfigFile,
    flags: Sequence[str],
    environ: Mapping[str, str],
) -> ResolvedConfig:
    try:
        return load_config(settings=settings, file=file, flags=flags, environ=environ)
    except ConfigError as error:
        # Each value may be right, and two of them together wrong: only loading all of them tells.
        if str(error) not in map(str, errors):
            errors.append(error)
    overrides = {path: item.raw for path, item in good.items() if not item.is_text}
    texts = [f"--{path}={item.raw}" for path, item in good.items() if item.is_text]
    try:
        return load_config(settings=settings, flags=texts, environ={}, overrides=overrides)
    except ConfigError:
        return load_config(settings=settings, environ={})


def _values(
    settings: Settings,
    file: ConfigFile,
    flags: Sequence[str],
    environ: Mapping[str, str],
    errors: list[ConfigError],
) -> Iterator[Callable[[], list[RawValue]]]:
    """Yield a reader of each value alone, the weakest source first; a file that cannot be read is an error and has none."""
    if file.error is not None:
        errors.append(file.error)
    else:
        for path, value in _leaves(file.tree, ()):
            nested: Any = value
            for key in reversed(path):
                nested = {key: nested}
            yield partial(from_tree, nested, settings, file.name)
    for name, text in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            yield partial(from_environment, {name: text}, settings)
    for flag in flags:
        yield partial(from_flags, [flag], settings)


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each key of each table alone; tables in tables, those of components, one level further."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and len(path) < 2:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
