"""``trencadis run-batch``: a file of requests in, a file of answers out."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from trencadis.api import Config, Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Lines fail alone. The same command goes on where an earlier one stopped: lines with an answer are skipped. "
        "Exit code: 0 if every line was answered, 1 if some failed, 2 if the batch could not be run."
    )
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="lines of requests, JSON")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="lines of answers, added to")
    parser.add_argument(
        "-e",
        "--errors",
        type=Path,
        metavar="FILE",
        help="lines that failed go here instead, written anew each time; a second run tries them again",
    )


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Answer the file and print a summary; returns 0 if no line failed, else 1.

    Raises:
        ConfigError: A file cannot be used.
        TrencadisError: The engine cannot be opened, or has ended for good.
    """
    import asyncio

    from trencadis.clock import SystemClock
    from trencadis_server.batch import run_batch

    # The output has one line for each request, so the access log need not.
    logging.getLogger("trencadis.access").setLevel(logging.WARNING)
    clock = SystemClock()
    start_s = clock.now_s()
    batch = run_batch(config, registry, input_file=args.input, output_file=args.output, error_file=args.errors)
    summary = asyncio.run(batch)
    print(
        f"{args.output}: {summary.num_ok} answered, {summary.num_failed} failed, {summary.num_skipped} done before, "
        f"in {clock.now_s() - start_s:.1f} s"
    )
    return 1 if summary.num_failed else 0
