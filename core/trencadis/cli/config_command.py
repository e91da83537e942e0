"""``trencadis config``: every setting, its value, and who set it."""

from __future__ import annotations

import argparse

from trencadis.config import Config
from trencadis.config.explain import as_json, explain
from trencadis.config.reference import flag_names, reference_page
from trencadis.console import print_table
from trencadis.registry import Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", action="store_true", help="print value, source, unit and meaning (the default)")
    what.add_argument("--reference", action="store_true", help="print the reference page, Markdown")
    what.add_argument("--flags", action="store_true", help="print the names of all config flags")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print what was asked for; returns 0."""
    resolved = args.resolved
    if args.reference:
        print(reference_page(resolved.settings), end="")
    elif args.flags:
        print("\n".join(flag_names(resolved.settings)))
    elif args.json:
        print(as_json(explain(resolved)))
    else:
        rows = [(row.path, row.value, row.source, row.unit, row.meaning) for row in explain(resolved)]
        print_table(("setting", "value", "source", "unit", "meaning"), rows)
    return 0
