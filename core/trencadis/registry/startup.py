"""Configuration and plugins together: what may be loaded is itself configured, so neither comes first.

[plugins] ▶ Registry.discover ▶ config classes ▶ load_config ▶ Registry.hooks.configure
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from trencadis.config import ConfigFile, ResolvedConfig, load_config, plugin_rules, read_config_file
from trencadis.config.messages import spot
from trencadis.config.schema import HERE
from trencadis.errors import ConfigError, ConfigValueError, must_be_one_of
from trencadis.interfaces.placement import Placement
from trencadis.registry.mentions import mentions_in
from trencadis.registry.registry import Registry

__all__ = ["completed", "find_placement", "load_with_plugins"]

ResultT = TypeVar("ResultT")


def load_with_plugins(
    *,
    file: Path | ConfigFile | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    extra_plugins: Iterable[Any] = (),
    entry_points: Iterable[EntryPoint] | None = None,
    may_import: bool = True,
) -> tuple[ResolvedConfig, Registry]:
    """Discover plugins and load the configuration with their tables. The way in for Python callers.

    Args:
        file: See ``load_config``.
        environ: See ``load_config``.
        flags: See ``load_config``.
        overrides: See ``load_config``.
        extra_plugins: See ``Registry.discover``.
        entry_points: See ``Registry.discover``.
        may_import: See ``load_config``.

    Raises:
        ConfigError: See ``load_config``.
        PluginError: See ``Registry.discover``.
    """
    content = file if isinstance(file, ConfigFile) else read_config_file(file, environ)
    rules = plugin_rules(file=content, environ=environ, flags=flags, overrides=overrides)
    registry = Registry.discover(
        blocked=rules.blocked,
        strict=rules.strict,
        extra_plugins=extra_plugins,
        entry_points=entry_points,
        mentions=mentions_in(content, environ=environ, flags=flags, overrides=overrides),
    )

    def load() -> ResolvedConfig:
        return load_config(
            settings=registry.settings,
            file=content,
            environ=environ,
            flags=flags,
            overrides=overrides,
            may_import=may_import,
        )

    resolved = completed(registry, load)
    registry.sources = resolved.sources
    find_placement(registry, resolved.config.engine.placement)
    return resolved, registry


def find_placement(registry: Registry, name: str) -> Placement | None:
    """Return a placement by name; None for one in the calling process.

    Args:
        registry: The plugins; those that nothing had asked for are loaded to find it.
        name: Value of ``engine.placement``.

    Raises:
        ConfigValueError: No usable plugin offers it.
        ComponentConflictError: Several plugins offer it.
        PluginLoadError: The hook of a plugin raised.
        ContractError: A plugin yields what is no placement.
    """
    if name in HERE:
        return None
    registry.complete("placement")
    found = registry.placements()
    if name not in found and registry.complete():
        found = registry.placements()
    if name in found:
        return found[name]
    source = registry.sources.get("engine.placement", "")
    reason = must_be_one_of(name, (*HERE, *sorted(found)))
    raise ConfigValueError(f"{spot('engine.placement', name, source)}: {reason}", hint=registry.left_out.in_words())


def completed(registry: Registry, load: Callable[[], ResultT]) -> ResultT:
    """Return what ``load()`` returns: with the plugins that something asked for, or where that does not suffice with all.

    Args:
        registry: The plugins.
        load: Reads the configuration with the registry's settings.

    Raises:
        ConfigError: It is wrong, all plugins considered; names those that cannot be used.
    """
    with registry.left_out.naming_broken():
        try:
            return load()
        except ConfigError:
            if not registry.complete():
                raise
            return load()
