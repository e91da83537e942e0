"""``trencadis plugins``: every component that is installed, where it comes from, and whether this configuration uses it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, get_args

import attrs

from trencadis.config import Config
from trencadis.console import print_table
from trencadis.errors import PluginError
from trencadis.hookspecs import NOUNS
from trencadis.interfaces.component import Stability
from trencadis.registry import Registry, ResolvedPlan, resolve_plan
from trencadis.registry.contracts import interface_version, stability_of
from trencadis.registry.listing import ComponentRow, processors_of, rows_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("--json", action="store_true", help="print JSON, with capabilities")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print the list, then the installed plugins that cannot be used; returns 0.

    Raises:
        PluginError: The configuration names a component that does not exist or does not fit the others. If a plugin is broken,
            everything is printed first, without roles.
    """
    try:
        plan, unresolved = resolve_plan(config, registry, sources=args.resolved.sources), None
    except PluginError as error:
        if not registry.broken:
            raise
        plan, unresolved = None, error
    _print(args, registry, plan)
    if unresolved is not None:
        raise unresolved
    return 0


def _listing(registry: Registry, plan: ResolvedPlan | None, rows: Sequence[ComponentRow]) -> dict[str, Any]:
    """Return what ``--json`` prints. Pure."""
    return {
        "plan_hash": plan.plan_hash if plan else "",
        "nouns": {noun: [row.name for row in rows if row.noun == noun] for noun in NOUNS},
        "contracts": {
            noun: {"interface_version": interface_version(noun), "stability": stability_of(noun)} for noun in NOUNS
        },
        "components": [{**attrs.asdict(row), "active": row.role == "active"} for row in rows],
        "logits_processors": [attrs.asdict(row) for row in processors_of(plan)],
        "broken": [{**attrs.asdict(item.provenance), "error": str(item.error)} for item in registry.broken.values()],
        "contested": [
            {"noun": noun, "name": name, "error": str(error)} for (noun, name), error in registry.contested.items()
        ],
    }


def _print(args: argparse.Namespace, registry: Registry, plan: ResolvedPlan | None) -> None:
    rows = list(rows_of(registry, plan))
    if args.json:
        print(json.dumps(_listing(registry, plan, rows), indent=2, ensure_ascii=False))
        return
    headings = (
        "noun",
        "component",
        "role",
        "default",
        "stability",
        "distribution",
        "version",
        "requires",
        "provides",
        "summary",
    )
    cells = [
        (
            row.noun,
            row.name,
            row.role,
            "yes" if row.default else "",
            row.stability,
            row.distribution or "(in code)",
            row.version,
            ", ".join(row.requires),
            ", ".join(row.provides),
            row.summary,
        )
        for row in rows
    ]
    print_table(headings, cells)
    for stability in get_args(Stability):
        contracts = [f"{noun} {interface_version(noun)}" for noun in NOUNS if stability_of(noun) == stability]
        if contracts:
            print(f"{stability} contracts: {', '.join(contracts)}")
    empty = [noun for noun in NOUNS if not any(row.noun == noun for row in rows)]
    if empty:
        print(f"no component installed: {', '.join(empty)}")
    for row in processors_of(plan):
        role = f" ({row.role})" if row.role else ""
        print(
            f"logits processor: {row.name}{role} {row.value} of {row.distribution or 'no distribution'} {row.version}"
        )
    for item in registry.broken.values():
        print(f"broken: {item.error}")
    for error in registry.contested.values():
        print(f"contested: {error}")
