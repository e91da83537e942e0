"""``trencadis workload``: summarise a workload, list the built-in ones, or write one as JSON lines."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trencadis.console import print_table
from trencadis_tools.commands.rate import add_rate

if TYPE_CHECKING:
    from trencadis_tools.workloads import Summary

__all__ = ["TAKES_CONFIG", "add_arguments", "run_alone"]

TAKES_CONFIG = False
"""The command uses no configuration."""

_MOST = 6
"""Maximum tenants and priorities in a table, of possibly thousands."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="WORKLOAD",
        help="a built-in workload, a workload file in TOML, or a trace file; without one, built-in workloads are listed",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="in place of the workload's")
    add_rate(parser)
    parser.add_argument("--max-requests", type=int, metavar="N", help="the first N of it (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write it as JSON lines, which are a workload too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print the workload, and write it if asked to; returns 0.

    Raises:
        ConfigError: There is no such workload, it cannot be used, or the file cannot be written.
    """
    import attrs

    from trencadis_tools.workloads import builtin_names, load_workload, summarise, write_workload

    if args.name is None:
        print(json.dumps(builtin_names()) if args.json else "\n".join(builtin_names()))
        return 0
    workload = load_workload(args.name, seed=args.seed, rate=args.rate, limit=args.max_requests)
    if args.write:
        write_workload(workload, args.write)
    summary = summarise(workload)
    if args.json:
        print(json.dumps(_plain(attrs.asdict(summary))))
    else:
        _print(summary)
    return 0


def _plain(value: Any) -> Any:
    """Return the value with None for infinite numbers and NaN, which JSON does not have. Pure."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(summary: Summary) -> None:
    print(f"{summary.name}, seed {summary.seed}: {summary.num_requests:,} requests", end="")
    print(f", {summary.num_following:,} of them after an answer" if summary.num_following else "", end="")
    print(f", {summary.num_sessions:,} sessions" if summary.num_sessions else "")
    followed = "sessions" if summary.num_following else "requests"
    print(
        f"arrivals: {summary.rate:.3g} {followed} a second in {summary.span_s:,.0f} s, variation of gaps {summary.gap_cv:.2f}"
        if summary.span_s
        else "arrivals: at once"
    )
    rows = [
        ("prompt tokens", summary.prompt_tokens, summary.num_prompt_tokens),
        ("output tokens", summary.output_tokens, summary.num_output_tokens),
    ]
    shown = [
        [what, *(f"{value:,.0f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max, total))]
        for what, spread, total in rows
    ]
    if summary.num_following:
        think = summary.think_s
        numbers = (think.mean, think.p50, think.p90, think.p99, think.max)
        shown.append(["pause s", *(f"{value:,.2f}" for value in numbers), ""])
    print_table(["", "mean", "p50", "p90", "p99", "max", "all"], shown)
    print(f"reusable: {summary.reusable_ratio:.1%} of prompt tokens, by a prefix cache without limit")
    for what, counts in (("tenants", summary.tenants), ("priorities", summary.priorities)):
        if len(counts) > 1:
            most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MOST]
            left = f", and {len(counts) - _MOST} more" if len(counts) > _MOST else ""
            print(f"{what}: {', '.join(f'{name} {number:,}' for name, number in most)}{left}")
