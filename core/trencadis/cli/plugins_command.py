"""``trencadis plugins``: every component that is installed, where it comes from, and whether this configuration uses it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import attrs

from trencadis.cli.tables import print_table
from trencadis.config import Config
from trencadis.config.schema import BUCKETING_BY_LAYOUT, DEFAULT_BACKEND
from trencadis.hookspecs import NOUNS
from trencadis.registry import RegisteredComponent, Registry, ResolvedPlan, resolve_plan

__all__ = ["SUMMARY", "ComponentRow", "add_arguments", "rows_of", "run"]

SUMMARY = "List installed components: where each comes from, and which this configuration uses."


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
        role: ``active``, ``fallback``, ``by layout`` (the backend decides between two), or empty.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("--json", action="store_true", help="print JSON, with capabilities")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print the list; returns 0.

    Raises:
        PluginError: The configuration names a component that does not exist or does not fit the others.
    """
    plan = resolve_plan(config, registry, sources=args.resolved.sources)
    rows = list(rows_of(registry, plan))
    if args.json:
        components = [{**attrs.asdict(row), "active": row.role == "active"} for row in rows]
        nouns = {noun: [row.name for row in rows if row.noun == noun] for noun in NOUNS}
        listing = {"plan_hash": plan.plan_hash, "nouns": nouns, "components": components}
        print(json.dumps(listing, indent=2, ensure_ascii=False))
        return 0
    headings = ("noun", "component", "role", "default", "distribution", "version", "requires", "provides", "summary")
    cells = [
        (
            row.noun,
            row.name,
            row.role,
            "yes" if row.default else "",
            row.distribution or "(in code)",
            row.version,
            ", ".join(row.requires),
            ", ".join(row.provides),
            row.summary,
        )
        for row in rows
    ]
    print_table(headings, cells)
    empty = [noun for noun in NOUNS if not any(row.noun == noun for row in rows)]
    if empty:
        print(f"no component installed: {', '.join(empty)}")
    return 0


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
        "by layout": plan.by_layout.values(),
        "fallback": plan.fallbacks.values(),
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
