"""``trencadis plugins``: every component that is installed, where it comes from, and whether this configuration uses it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import attrs

from trencadis.config import Config
from trencadis.console import print_table, print_text
from trencadis.errors import ConfigError, PluginError, did_you_mean
from trencadis.interfaces.component import Stability
from trencadis.interfaces.noun import Noun
from trencadis.registry import Registry, ResolvedPlan, resolve_plan
from trencadis.registry.listing import ComponentRow, processors_of, rows_of

__all__ = ["add_arguments", "run"]

_NARROW: Mapping[str, Callable[[ComponentRow], str]] = {
    "noun": lambda row: row.noun,
    "name": lambda row: row.name,
    "state": lambda row: row.role,
    "summary": lambda row: row.summary,
}
"""Columns, as text of a row each."""

_WIDE: Mapping[str, Callable[[ComponentRow], str]] = {
    **{heading: _NARROW[heading] for heading in ("noun", "name", "state")},
    "default": lambda row: "yes" if row.default else "",
    "stability": lambda row: row.stability,
    "distribution": lambda row: row.distribution or "(in code)",
    "version": lambda row: row.version,
    "requires": lambda row: ", ".join(row.requires),
    "provides": lambda row: ", ".join(row.provides),
    "summary": lambda row: row.summary,
}
"""All columns, for ``--wide``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("noun", nargs="?", default="", metavar="NOUN", help="only of one noun, such as scheduling")
    parser.add_argument("--wide", action="store_true", help="print origin, version, stability and capabilities as well")
    parser.add_argument("--json", action="store_true", help="print JSON, with everything, of all nouns")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print the list, then the installed plugins that cannot be used; returns 0.

    Raises:
        ConfigError: There is no such noun.
        PluginError: The configuration names a component that does not exist or does not fit the others. If a plugin is broken,
            everything is printed first, without roles.
    """
    nouns = registry.nouns
    if args.noun not in ("", *nouns):
        raise ConfigError(
            f'plugins: there is no noun "{args.noun}".{did_you_mean(args.noun, nouns)} Choose one of: {", ".join(nouns)}.'
        )
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
        "nouns": {noun: [row.name for row in rows if row.noun == noun] for noun in registry.nouns},
        "contracts": {
            name: {"interface_version": noun.interface_version, "stability": noun.stability}
            for name, noun in registry.nouns.items()
        },
        "components": [{**attrs.asdict(row), "active": row.role == "active"} for row in rows],
        "stages": [
            {
                "name": one.definition.name,
                "summary": one.definition.summary,
                "before": sorted(one.definition.before),
                **attrs.asdict(one.provenance),
            }
            for one in registry.stages
        ],
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
    shown = [row for row in rows if args.noun in ("", row.noun)]
    columns = _WIDE if args.wide else _NARROW
    headings = [heading for heading in columns if heading != "noun" or not args.noun]
    print_table(headings, [[columns[heading](row) for heading in headings] for row in shown])
    if not args.noun or not shown:
        empty = [
            noun for noun in registry.nouns if args.noun in ("", noun) and not any(row.noun == noun for row in rows)
        ]
        if empty:
            print_text(f"no component installed: {', '.join(empty)}", indent="  ")
    if not args.noun and registry.stages:
        _print_stages(registry, wide=args.wide)
    if args.wide:
        _print_contracts([one for name, one in registry.nouns.items() if args.noun in ("", name)])
    for one in processors_of(plan) if args.noun in ("", "sampling") else ():
        role = f" ({one.role})" if one.role else ""
        print_text(
            f"logits processor: {one.name}{role} {one.value} of {one.distribution or 'no distribution'} {one.version}",
            indent="  ",
        )
    for item in registry.broken.values():
        print_text(f"broken: {item.error}", indent="  ")
    for (noun, _), error in registry.contested.items():
        if args.noun in ("", noun):
            print_text(f"contested: {error}", indent="  ")


def _print_stages(registry: Registry, *, wide: bool) -> None:
    """Print the stages in the order in which an engine calls them."""
    print_text("stages of an engine, in the order in which they act:", indent="  ")
    headings = ["stage", "before", "distribution", "summary"] if wide else ["stage", "summary"]
    rows = []
    for one in registry.stages:
        definition = one.definition
        origin = [", ".join(sorted(definition.before)), one.provenance.distribution or "(in code)"] if wide else []
        rows.append([definition.name, *origin, definition.summary])
    print_table(headings, rows)


def _print_contracts(nouns: Sequence[Noun]) -> None:
    """Print the version of each noun's contract, by stability."""
    for stability in get_args(Stability):
        contracts = [f"{one.name} {one.interface_version}" for one in nouns if one.stability == stability]
        if contracts:
            print_text(f"{stability} contracts: {', '.join(contracts)}", indent="  ")
