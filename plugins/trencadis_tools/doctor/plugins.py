"""Checks of every installed plugin: its components, or why it cannot be used."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import EntryPoint

from trencadis.api import PluginLoader, PluginsConfig, Provenance, Registry
from trencadis.hookspecs import PROJECT_NAME
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_plugins"]


def check_plugins(found: Findings, rules: PluginsConfig, plugins: PluginLoader) -> Registry:
    """Check every plugin; return the registry of the usable ones.

    An unusable plugin is a warning, since engines start without it, and a failure with ``plugins.strict``.

    Args:
        found: Findings to add to.
        rules: Table ``[plugins]``.
        plugins: Installed plugins, loaded.
    """
    hidden = set(rules.blocked)
    points = sorted(importlib.metadata.entry_points(group=PROJECT_NAME), key=_rank)
    if not points:
        found.fail("no plugin is installed, not even the built-in ones", "Run pip install trencadis again.")
    registry = Registry.of(plugins)
    note = found.fail_with if rules.strict else found.warn_with
    for point in points:
        full_name = _full_name(point)
        if hidden & {point.name, full_name}:
            found.ok(f"plugin {point.name}: blocked")
            continue
        name = full_name if full_name in {*registry.broken, *registry.plugins} else point.name
        if name in registry.broken:
            note(registry.broken[name].error)
        else:
            found.ok(f"plugin {point.name}: {_offers(registry, registry.plugins[name])}")
    for error in registry.contested.values():
        note(error)
    known = {name for point in points for name in (point.name, _full_name(point))}
    for name in sorted(hidden - known):
        found.warn(f"blocked plugin {name}: no plugin has that name", _how_to_name(points))
    return registry


def _rank(point: EntryPoint) -> tuple[bool, str]:
    return point.dist is None or point.dist.name != PROJECT_NAME, point.name


def _full_name(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else ''}:{point.name}"


def _offers(registry: Registry, plugin: Provenance) -> str:
    """Return a plugin's components and distribution, in words."""
    offers = [
        f"{noun} {name}"
        for noun in registry.nouns
        for name, item in registry.components(noun).items()
        if item.provenance == plugin
    ]
    owner = f"{plugin.distribution} {plugin.version}" if plugin.distribution else "no distribution"
    return f"{', '.join(offers) or 'hooks only'} ({owner})"


def _how_to_name(points: Sequence[EntryPoint]) -> str:
    return f"Remove it from [plugins] blocked, or use one of: {', '.join(point.name for point in points)}."
