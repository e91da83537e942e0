"""Every component that is installed, where it comes from, and what the configuration uses it for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import attrs

from trencadis.config import Config
from trencadis.config.schema import BUCKETING_BY_LAYOUT, DEFAULT_BACKEND, DEFAULT_EXECUTOR
from trencadis.hookspecs import PROCESSOR_GROUP
from trencadis.interfaces.component import Stability
from trencadis.interfaces.noun import Noun
from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.contracts import CORE_NOUNS
from trencadis.registry.plan import ResolvedPlan
from trencadis.registry.provenance import distribution_of
from trencadis.registry.registry import Registry

__all__ = ["ComponentRow", "ProcessorRow", "processors_of", "rows_of"]


@attrs.frozen(kw_only=True)
class ComponentRow:
    """One component of the list.

    Attributes:
        noun: Such as ``bucketing``.
        name: Name in the config.
        summary: One line.
        distribution: Installed distribution; empty for one given in code.
        version: Version of the distribution.
        plugin: Name under which the plugin can be blocked.
        role: ``active``, ``inner`` (another one is around it), ``fallback``, ``shadow``, ``by layout`` (the backend decides between two), or empty.
        default: Used if the config says nothing.
        stability: ``stable``, ``provisional`` or ``experimental``.
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
    stability: Stability
    requires: tuple[str, ...]
    provides: tuple[str, ...]


@attrs.frozen(kw_only=True)
class ProcessorRow:
    """One installed logits processor of another package.

    Attributes:
        name: Name in a sampler's chain.
        value: Value of the entry point, ``package.module:Class``.
        distribution: That offers it.
        version: Version of the distribution.
        role: ``active`` if an option of the sampler names it, or empty.
    """

    name: str
    value: str
    distribution: str
    version: str
    role: str


def processors_of(plan: ResolvedPlan | None) -> list[ProcessorRow]:
    """Return the logits processors that installed packages offer by entry points, by name; imports none."""
    options: Any = plan.choices["sampling"].options if plan and "sampling" in plan.choices else None
    values = attrs.asdict(options).values() if attrs.has(type(options)) else ()
    named = {name for value in values if isinstance(value, tuple | list) for name in value}
    rows = []
    for point in importlib.metadata.entry_points(group=PROCESSOR_GROUP):
        distribution, version = distribution_of(point)
        role = "active" if point.name in named else ""
        rows.append(
            ProcessorRow(name=point.name, value=point.value, distribution=distribution, version=version, role=role)
        )
    return sorted(rows, key=lambda row: (row.name, row.distribution))


def rows_of(registry: Registry, plan: ResolvedPlan | None) -> Iterator[ComponentRow]:
    """Yield every component by noun and name; those given by import path after the registered ones of their noun.

    Without a plan no component has a role.
    """
    roles = _roles(plan) if plan else {}
    for noun in registry.nouns:
        found = registry.components(noun)
        named = {name: item for (owner, name), (_, item) in roles.items() if owner == noun and name not in found}
        for item in [*found.values(), *named.values()]:
            defaults = _defaults(registry.nouns[noun])
            yield _row(item, roles.get((noun, item.name), ("", item))[0], is_default=item.name in defaults)


def _row(item: RegisteredComponent, role: str, *, is_default: bool) -> ComponentRow:
    return ComponentRow(
        noun=item.noun,
        name=item.name,
        summary=item.component.summary,
        distribution=item.provenance.distribution,
        version=item.provenance.version,
        plugin=item.provenance.plugin,
        role=role,
        default=is_default,
        stability=item.component.stability,
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


def _defaults(noun: Noun) -> tuple[str, ...]:
    """Return the names used if the config says nothing: for ``auto``, those it can become."""
    default = Config()
    if noun.name == "observer":
        return default.observer.names
    name: str = default.noun(noun.name).name if noun.name in CORE_NOUNS else noun.default
    if name != "auto":
        return (name,)
    become = {
        "backend": (DEFAULT_BACKEND,),
        "executor": (DEFAULT_EXECUTOR,),
        "bucketing": tuple(BUCKETING_BY_LAYOUT.values()),
    }
    return become[noun.name]
