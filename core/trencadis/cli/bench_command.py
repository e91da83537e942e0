"""``trencadis bench``: measure the configured engine."""

from __future__ import annotations

import argparse
import json

import attrs

from trencadis.cli.tables import print_table
from trencadis.config import Config
from trencadis.registry import Registry

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Measure the throughput of this configuration."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    from trencadis.bench import ThroughputWorkload

    helps = {
        "num_requests": "requests, all queued at the start",
        "input_len": "random prompt tokens of each",
        "output_len": "output tokens of each",
        "seed": "of the prompts",
    }
    parser.add_argument("measurement", choices=["throughput"], help="throughput: output tokens a second, offline")
    for field in attrs.fields(ThroughputWorkload):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{helps[field.name]} (default: {field.default})"
        parser.add_argument(flag, dest=field.name, type=int, default=field.default, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigValueError: A length or count below 1.
        TrencadisError: The engine cannot be built, or a request failed.
    """
    from trencadis.bench import ThroughputWorkload, measure_throughput
    from trencadis.errors import ConfigValueError

    try:
        workload = ThroughputWorkload(
            **{field.name: getattr(args, field.name) for field in attrs.fields(ThroughputWorkload)}
        )
    except ValueError as error:
        raise ConfigValueError(f"trencadis bench throughput: {error}.") from error
    result = attrs.asdict(measure_throughput(config, registry, workload))
    if args.json:
        print(json.dumps(result))
        return 0
    print_table(("measure", "value"), [(name, _show(value)) for name, value in result.items()])
    return 0


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
