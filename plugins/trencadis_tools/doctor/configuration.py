"""Every source of the configuration and every value by itself, so that one look shows all that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trencadis.config import ResolvedConfig, Settings, load_config, plugin_rules, settings_of
from trencadis.config.assemble import Assembly
from trencadis.config.schema import PluginsConfig
from trencadis.config.settings import ENVIRONMENT_PREFIX
from trencadis.config.sources import (
    FILE_VARIABLE,
    Given,
    from_environment,
    from_flags,
    from_tree,
    read_file,
)
from trencadis.config.strangers import strangers
from trencadis.errors import ConfigError
from trencadis.registry import Registry
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_configuration", "rules_of_plugins"]


def rules_of_plugins(file: Path | None, flags: Sequence[str], environ: Mapping[str, str]) -> PluginsConfig:
    """Return the table ``[plugins]``; the default if it cannot be known, which the check of the sources then says."""
    try:
        return plugin_rules(file=file, flags=flags, environ=environ)
    except ConfigError:
        return PluginsConfig()


def check_configuration(
    found: Findings, registry: Registry, file: Path | None, flags: Sequence[str], environ: Mapping[str, str]
) -> ResolvedConfig:
    """Check file, environment and flags; returns the configuration that the valid values make.

    Args:
        found: Takes the findings.
        registry: Of the plugins that can be loaded: their tables are known.
        file: As given on the command line, or None.
        flags: Config flags.
        environ: The environment.
    """
    components = registry.config_classes()
    settings = settings_of(components)
    named = file or (Path(environ[FILE_VARIABLE]) if environ.get(FILE_VARIABLE) else None)
    tree = _read(found, named)
    good: dict[str, Given] = {}
    for read in (_of_file(tree, named), _of_environment(environ), _of_flags(flags)):
        for ask in read:
            _take(found, ask, settings, good)
    unknown = strangers(environ, settings)
    for name, advice in unknown.items():
        found.warn(f"environment {name}: has no effect", advice)
    # Found here, so that loading need not say it again.
    environ = {name: text for name, text in environ.items() if name not in unknown}
    _say_where_values_come_from(found, named, good)
    try:
        return load_config(components=components, file=file, flags=flags, environ=environ)
    except ConfigError as error:
        # Each value may be right, and two of them together wrong: that is known only here.
        told = {str(item.message) for item in found}
        if " ".join(str(error).removesuffix(error.hint).split()) not in told:
            found.fail_with(error)
    overrides = {path: item.raw for path, item in good.items() if not item.is_text}
    texts = [f"--{path}={item.raw}" for path, item in good.items() if item.is_text]
    try:
        return load_config(components=components, flags=texts, environ={}, overrides=overrides)
    except ConfigError:
        return load_config(components=components, environ={})


class _Ask:
    """One value of one source, not yet looked at."""

    def __init__(self, kind: str, content: Any, name: str = "") -> None:
        self.kind, self.content, self.name = kind, content, name

    def given(self, settings: Settings) -> list[Given]:
        if self.kind == "file":
            return from_tree(self.content, settings, self.name)
        if self.kind == "environment":
            return from_environment(self.content, settings)
        return from_flags(self.content, settings)


def _take(found: Findings, ask: _Ask, settings: Settings, good: dict[str, Given]) -> None:
    """Keep a value that exists and is of its type and range; the later source wins."""
    try:
        for item in ask.given(settings):
            alone = {item.path: item}
            if settings.get(item.path) is not None:
                Assembly(settings, alone).config()
            good.update(alone)
    except ConfigError as error:
        found.fail_with(error)


def _read(found: Findings, file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return read_file(file)
    except ConfigError as error:
        found.fail_with(error)
        return {}


def _of_file(tree: Mapping[str, Any], file: Path | None) -> Iterator[_Ask]:
    """Yield each key of each table alone; tables in tables, those of components, one level further."""
    name = file.name if file is not None else ""
    for path, value in _leaves(tree, ()):
        nested: Any = value
        for key in reversed(path):
            nested = {key: nested}
        yield _Ask("file", nested, name)


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and len(path) < 2:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _of_environment(environ: Mapping[str, str]) -> Iterator[_Ask]:
    for name, text in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            yield _Ask("environment", {name: text})


def _of_flags(flags: Sequence[str]) -> Iterator[_Ask]:
    for flag in flags:
        yield _Ask("flag", [flag])


def _say_where_values_come_from(found: Findings, file: Path | None, good: Mapping[str, Given]) -> None:
    counts: dict[str, int] = {}
    for item in good.values():
        kind = item.source.split(" ")[0]
        counts[kind] = counts.get(kind, 0) + 1
    if file is not None:
        counts.setdefault(file.name, 0)
    texts = [f"{number} from {name}" for name, number in counts.items()]
    found.ok(f"valid values: {', '.join(texts) if texts else 'defaults only'}")
