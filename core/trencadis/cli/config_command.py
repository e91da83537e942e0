"""``trencadis config``: every setting, its value, and who set it; then whether the components that it names fit each other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trencadis.client.factory import check_model
from trencadis.config import Config, ResolvedConfig
from trencadis.config.explain import Row, as_json, explain
from trencadis.config.reference import flag_names, reference_page
from trencadis.console import print_table
from trencadis.errors import UnknownKeyError, did_you_mean
from trencadis.registry import Registry, resolve_plan
from trencadis.registry.layout_support import check_layout

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "table", nargs="?", default="", metavar="TABLE", help="only this table, such as engine or scheduling.fcfs"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", action="store_true", help="print value, source, unit and meaning (the default)")
    what.add_argument("--reference", action="store_true", help="print the reference page, Markdown")
    what.add_argument("--flags", action="store_true", help="print the names of all config flags")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print what was asked for, and check it; returns 0.

    Raises:
        UnknownKeyError: There is no such table.
        ModelLoadError: The model is nowhere.
        PluginError: The configuration names a component that does not exist, or does not fit the others. It is printed first.
    """
    resolved = args.resolved
    if args.reference:
        print(reference_page(resolved.settings), end="")
        return 0
    if args.flags:
        print("\n".join(flag_names(resolved.settings)))
        return 0
    rows = _rows(resolved, args.table)
    if args.json:
        print(as_json(rows))
    else:
        _print(rows)
    sys.stdout.flush()  # before what is wrong with it
    check_layout(config, resolve_plan(config, registry, sources=resolved.sources))
    check_model(config, resolved.sources, asks_hub=False)
    return 0


def _rows(resolved: ResolvedConfig, table: str) -> list[Row]:
    rows = [row for row in explain(resolved) if not table or row.path.startswith(f"{table}.")]
    tables = list(resolved.settings.tables())
    if rows or not table or table in tables:
        return rows
    names = [name for name in tables if "." not in name]
    raise UnknownKeyError(
        f'config: there is no table "{table}".{did_you_mean(table, tables)} The tables are: {", ".join(names)}.'
    )


def _print(rows: Sequence[Row]) -> None:
    """Print each setting with its whole path in a line; on a terminal, where lines are short, table by table."""
    if not sys.stdout.isatty():
        cells = [(row.path, row.value, row.source, row.unit, row.meaning) for row in rows]
        print_table(("setting", "value", "source", "unit", "meaning"), cells)
        return
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.path.rpartition(".")[0], []).append(row)
    for number, (table, found) in enumerate(tables.items()):
        print(f"{chr(10) if number else ''}[{table}]")
        lines = [
            (row.path.rpartition(".")[2], f"{row.value} {row.unit}".rstrip(), row.source, row.meaning) for row in found
        ]
        print_table(("key", "value", "source", "meaning"), lines)
