"""``trencadis doctor``: what is wrong, and how to mend it; works also where nothing else does."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import attrs

__all__ = ["add_arguments", "run_alone"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print what is right as well; of a model that is named by --model.path it is printed anyway",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Examine and print; returns 0 without failures, else 1. Warnings are not failures."""
    from trencadis.console import print_text
    from trencadis.interfaces import Severity
    from trencadis_tools.doctor import examine

    found = examine(file=args.config_file, plugins=args.plugins, flags=flags, environ=os.environ)
    num_failed = found.count(Severity.FAIL)
    if args.json:
        items = [{**attrs.asdict(item), "severity": item.severity.value} for item in found]
        counts = {f"num_{severity.value}": found.count(severity) for severity in Severity}
        print(json.dumps({**counts, "findings": items}, indent=2, ensure_ascii=False))
        return 1 if num_failed else 0
    names_a_model = any(flag.partition("=")[0] == "--model.path" for flag in flags)
    for item in found:
        if args.verbose or item.severity is not Severity.OK or (names_a_model and item.section == "model"):
            print_text(f"{item.severity.value.upper():4}  {item.section}: {item.message}", indent=" " * 6)
            if item.remedy:
                print_text(f"      → {item.remedy}", indent=" " * 8)
    num_ok = found.count(Severity.OK)
    summary = f"{num_ok} ok, {found.count(Severity.WARN)} doubtful, {num_failed} wrong"
    print_text(summary if args.verbose else f"{summary}; trencadis doctor -v shows all.", indent="  ")
    return 1 if num_failed else 0
