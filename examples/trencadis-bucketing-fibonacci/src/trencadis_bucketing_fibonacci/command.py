"""``trencadis fibonacci``: print the sizes up to a limit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trencadis_bucketing_fibonacci.fibonacci import fibonacci_sizes

__all__ = ["TAKES_CONFIG", "add_arguments", "run_alone"]

TAKES_CONFIG = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("largest", type=int, help="the largest size")
    parser.add_argument("--smallest", type=int, default=1, help="the smallest size (default: 1)")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print the sizes; returns 0."""
    print(*fibonacci_sizes(args.largest, smallest=args.smallest))
    return 0
