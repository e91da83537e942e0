"""Every component that is installed, where it comes from, and what the configuration uses it for."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from trencadis.config import Config
from trencadis.config.schema import BUCKETING_BY_LAYOUT, DEFAULT_BACKEND
from trencadis.hookspecs import NOUNS
from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.plan import ResolvedPlan
from trencadis.registry.registry import Registry

__all__ = ["ComponentRow", "rows_of"]


@attrs.frozen(kw_only=True)
class ComponentRow:
    """One component of the list.

    Attributes:
        noun: Such as ``bucketing``.
        name: As the config names it.
        summary: One line.
        distribution: Installed distribution; empty for one given in code.
        version: Of the distribution.
        plugin: Name under which the plugin can be blocked.
        role: ``active``, ``inner`` (another one is around it), ``fallback``, ``shadow``, ``by layout`` (the backend decides between two), or empty.
        default: Used if the config says nothing.
        requires: Capabilities it needs.
        provides: Capabilities it has.
    """

    noun: str
    name: str
    summary: str
    distribution: str
    version: str
    plugin: str
    role: str
    default: bool
    requires: tuple[str, ...]
    provides: tuple[str, ...]


def rows_of(registry: Registry, plan: ResolvedPlan) -> Iterator[ComponentRow]:
    """Yield every component by noun and name; those given by import path after the registered ones of their noun."""
    roles = _roles(plan)
    for noun in NOUNS:
        found = registry.components(noun)
        named = {name: item for (owner, name), (_, item) in roles.items() if owner == noun and name not in found}
        for item in [*found.values(), *named.values()]:
            yield _row(item, roles.get((noun, item.name), ("", item))[0])


def _row(item: RegisteredComponent, role: str) -> ComponentRow:
    return ComponentRow(
        noun=item.noun,
        name=item.name,
        summary=item.component.summary,
        distribution=item.provenance.distribution,
        version=item.provenance.version,
        plugin=item.provenance.plugin,
        role=role,
        default=item.name in _defaults(item.noun),
        requires=tuple(sorted(item.component.requires)),
        provides=tuple(sorted(item.component.provides)),
    )


def _roles(plan: ResolvedPlan) -> dict[tuple[str, str], tuple[str, RegisteredComponent]]:
    """Return what each component of the plan is there for; the strongest role if it has several."""
    roles: dict[tuple[str, str], tuple[str, RegisteredComponent]] = {}
    groups = {
        "active": [*plan.choices.values(), *plan.observers],
        "inner": plan.inner.values(),
        "by layout": plan.by_layout.values(),
        "fallback": plan.fallbacks.values(),
        "shadow": [] if plan.shadow is None else [plan.shadow],
    }
    for role, group in groups.items():
        for choice in group:
            roles.setdefault((choice.component.noun, choice.component.name), (role, choice.component))
    return roles


def _defaults(noun: str) -> tuple[str, ...]:
    """Return the names used if the config says nothing: for ``auto``, those it can become."""
    default = Config()
    if noun == "observer":
        return default.observer.names
    name: str = getattr(default, noun).name
    if name != "auto":
        return (name,)
    return (DEFAULT_BACKEND,) if noun == "backend" else tuple(BUCKETING_BY_LAYOUT.values())
