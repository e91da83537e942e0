"""Every installed plugin by itself, so that a broken one is named and does not hide the others."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint

from trencadis.doctor.findings import Findings
from trencadis.errors import PluginError
from trencadis.hookspecs import NOUNS, PROJECT_NAME
from trencadis.registry import Registry

__all__ = ["check_plugins"]


def check_plugins(found: Findings, blocked: Iterable[str]) -> Registry:
    """Load every plugin alone, then all that can be loaded together; returns the registry of those.

    What comes with the engine is loaded first: where a plugin of somebody else has a component of the same name, that one is wrong.

    Args:
        found: Takes the findings.
        blocked: Names that are not to be loaded.
    """
    hidden = set(blocked)
    points = sorted(importlib.metadata.entry_points(group=PROJECT_NAME), key=_rank)
    if not points:
        found.fail("no plugin is installed, not even the built-in ones", "Run pip install trencadis again.")
    good: list[EntryPoint] = []
    registry = Registry.discover(entry_points=())
    for point in points:
        full_name = _full_name(point)
        if hidden & {point.name, full_name}:
            found.ok(f"plugin {point.name}: blocked")
            hidden.discard(point.name)
            hidden.discard(full_name)
            continue
        try:
            alone = _load(points, [point])
            # Together with the good ones before it: two may offer one name.
            registry = _load(points, [*good, point])
        except PluginError as error:
            found.fail_with(error)
            continue
        good.append(point)
        found.ok(f"plugin {point.name}: {_offers(alone, point)}")
    for name in sorted(hidden):
        found.warn(f"blocked plugin {name}: no plugin has that name", _how_to_name(points))
    return registry


def _rank(point: EntryPoint) -> tuple[bool, str]:
    return point.dist is None or point.dist.name != PROJECT_NAME, point.name


def _load(points: Sequence[EntryPoint], wanted: Sequence[EntryPoint]) -> Registry:
    """Return the registry of some plugins; each is called what it is called where all are loaded, and can be blocked by."""
    names = {_full_name(point) for point in wanted}
    return Registry.discover(entry_points=points, blocked={_full_name(point) for point in points} - names)


def _full_name(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else ''}:{point.name}"


def _offers(registry: Registry, point: EntryPoint) -> str:
    """Return what a plugin offers, and who made it."""
    offers = [f"{noun} {name}" for noun in NOUNS for name in registry.components(noun)]
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "no distribution"
    return f"{', '.join(offers) or 'hooks only'} ({owner})"


def _how_to_name(points: Sequence[EntryPoint]) -> str:
    return f"Remove it from [plugins] blocked, or use one of: {', '.join(point.name for point in points)}."
