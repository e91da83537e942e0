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
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Examine and print; returns 0 if nothing is wrong, else 1. Warnings are not wrong."""
    from trencadis.interfaces import Severity
    from trencadis_tools.doctor import examine

    found = examine(file=args.config_file, plugins=args.plugins, flags=flags, environ=os.environ)
    num_failed = found.count(Severity.FAIL)
    if args.json:
        items = [{**attrs.asdict(item), "severity": item.severity.value} for item in found]
        counts = {f"num_{severity.value}": found.count(severity) for severity in Severity}
        print(json.dumps({**counts, "findings": items}, indent=2, ensure_ascii=False))
        return 1 if num_failed else 0
    for item in found:
        print(f"{item.severity.value.upper():4}  {item.section}: {item.message}")
        if item.remedy:
            print(f"      → {item.remedy}")
    print(f"{found.count(Severity.OK)} ok, {found.count(Severity.WARN)} doubtful, {num_failed} wrong")
    return 1 if num_failed else 0
